"""Filling a batch in rounds: dynamic filtering with replacement (DAPO, arXiv:2503.14476), and over-sampling.

::

    kept by earlier iterations ──┬───────────────────┐
                                 │ too old           ├─▶ the first rollout.batch_size groups: this batch
    unfinished by then ──┐       ▼                   │   the others wait for the next
                         ├─▶ round 0, 1, … ─▶ kept ──┘
    prompts, from the ───┘       ├──▶ filtered, failed: counted, never trained
    cursor on                    └──▶ unfinished: gone on with by the next round, of this iteration or of a later one

A round is drawn while groups are missing, unless the data ends, the epoch of the batch's groups ends (batches do not
cross epochs), or the limit of rounds is reached. Everything here is a pure function of the recorded rounds.

Without partial rollout a round awaits all that it draws, and leaves nothing unfinished. With it, each round fills up what is in
flight to ``generate_batch_size`` groups, and returns when as many are finished as the batch misses, rejected ones reckoned in.

A group is too old when its tokens would be more than ``config.max_age`` versions behind the policy that trains on them. It is
sampled again, under its own id, by the next round, which awaits it: so it does not get too old in flight once more.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.algorithms.filtering import FilterCounts, Verdict, judge_group
from rlhf_core.cluster.measures import RolloutTally
from rlhf_core.errors import RunFailedError
from rlhf_core.records import Draw, KeptGroup, OpenGroup, PromptCursor, Round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.cluster.rollout_worker import RolloutOutcome
    from rlhf_core.cluster.scoring_worker import Scored
    from rlhf_core.config import Config


@dataclass(frozen=True, slots=True)
class Filling:
    """The batch of an iteration, as far as its recorded rounds go."""

    config: Config
    iteration: int
    carried: tuple[KeptGroup, ...]  # kept by earlier iterations and not trained, oldest first
    cursor_in: PromptCursor
    rounds: tuple[Round, ...] = ()
    most_rounds: int | None = None  # of a replay: those that its source sampled; more cannot be had
    carried_unfinished: tuple[OpenGroup, ...] = ()  # begun by earlier iterations

    def with_round(self, played: Round) -> Filling:
        """The batch after one more round.

        Raises:
            RunFailedError: a prompt was drawn that had been drawn before, or one that had been drawn is lost.
        """
        known = {group.group_id for group in self.carried} | {group.group_id for group in self.carried_unfinished}
        known |= {group_id for earlier in self.rounds for group_id in earlier.verdicts}
        open_before = {group.group_id for group in self.unfinished}
        open_after = {group.group_id for group in played.unfinished}
        twice = sorted((known & played.verdicts.keys()) - open_before - set(played.again))
        lost = sorted((open_before | set(played.again)) - played.verdicts.keys() - open_after)
        moved = played.cursor_out > self.cursor
        # A round that a replay takes over may hold groups that had waited, and no new ones.
        stands = played.cursor_out == self.cursor and (played.drawn == 0 or self.most_rounds is not None)
        if twice or not (moved or stands):
            raise RunFailedError(
                f"iteration {self.iteration}, round {played.number}: prompts are drawn twice: from {self.cursor} to "
                f"{played.cursor_out}, groups {twice[:3]}"
            )
        if lost:
            raise RunFailedError(
                f"iteration {self.iteration}, round {played.number}: groups {lost[:3]} were in flight, and are neither "
                "finished nor in flight any more"
            )
        return replace(self, rounds=(*self.rounds, played))

    @property
    def cursor(self) -> PromptCursor:
        """Where the next draw begins."""
        return self.rounds[-1].cursor_out if self.rounds else self.cursor_in

    @property
    def unfinished(self) -> tuple[OpenGroup, ...]:
        """The groups in flight."""
        return self.rounds[-1].unfinished if self.rounds else self.carried_unfinished

    @property
    def kept(self) -> tuple[KeptGroup, ...]:
        """Every group that may be trained: those kept by earlier iterations first, then in the order they were drawn."""
        fresh = (group for group in self._waiting if not self._too_old(group.spoken_since))
        return (*fresh, *(group for played in self.rounds for group in kept_groups(played)))

    @property
    def again(self) -> tuple[str, ...]:
        """The groups that are too old by now: kept ones, and ones in flight."""
        kept = [group.group_id for group in self._waiting if self._too_old(group.spoken_since)]
        return (*kept, *(group.group_id for group in self.unfinished if self._too_old(group.since)))

    @property
    def selected(self) -> tuple[KeptGroup, ...]:
        """The groups of this batch."""
        return self.kept[: self.config.rollout.batch_size]

    @property
    def buffered(self) -> tuple[KeptGroup, ...]:
        """The groups left to the next batch, those that are too old included."""
        old = (group for group in self._waiting if self._too_old(group.spoken_since))
        return (*old, *self.kept[self.config.rollout.batch_size :])

    @property
    def _waiting(self) -> list[KeptGroup]:
        """What earlier iterations kept, but for what a round of this one sampled again."""
        sampled = {group_id for played in self.rounds for group_id in played.again}
        return [group for group in self.carried if group.group_id not in sampled]

    def _too_old(self, version: int) -> bool:
        """True if tokens of this version must not be trained by this iteration."""
        max_age = self.config.max_age
        return max_age is not None and version < self.iteration - max_age

    @property
    def counts(self) -> FilterCounts:
        """The groups of all rounds, by verdict."""
        counts = FilterCounts()
        for played in self.rounds:
            for verdict in played.verdicts.values():
                counts = counts.with_verdict(Verdict(verdict))
        return counts

    @property
    def is_full(self) -> bool:
        """True if the batch has all its groups."""
        return len(self.selected) == self.config.rollout.batch_size

    @property
    def may_draw(self) -> bool:
        """True if this batch may take prompts from the cursor on: the data does not end there, nor the epoch of its groups."""
        epoch = self.cursor.epoch
        at_hand = [
            *self.again,
            *(group.group_id for group in self.kept),
            *(group.group_id for group in self.unfinished),
        ]
        of_others = any(PromptCursor.of_group(group_id).epoch != epoch for group_id in at_hand)
        return epoch < self.config.train.num_episodes and not of_others

    @property
    def at_end(self) -> bool:
        """True if this batch can have no more groups: none may be drawn, and none is in flight or to be sampled again.

        What the source of a replay did not sample for this batch cannot be drawn later either.
        """
        if self.most_rounds is not None:
            return len(self.rounds) >= self.most_rounds
        return not (self.may_draw or self.unfinished or self.again)

    @property
    def at_limit(self) -> bool:
        """True if no further round is allowed. Rounds that leave groups in flight count by what they finish."""
        most = self.config.algo.dynamic_filtering_max_rounds
        if self.config.carries_unfinished:
            return self.counts.generated >= most * self.config.generate_batch_size
        return len(self.rounds) >= most

    @property
    def is_broken(self) -> bool:
        """True if everything failed, a whole round's worth: more rounds would only fail too."""
        counts = self.counts
        return not self.kept and counts.failed == counts.generated >= self.config.generate_batch_size

    @property
    def needs_round(self) -> bool:
        """True if groups are missing and may still be had."""
        return not (self.is_full or self.at_end or self.at_limit or self.is_broken)

    @property
    def next_draw(self) -> Draw:
        """What the next round samples: with what is in flight or sampled again, ``generate_batch_size`` groups.

        So many also for few missing groups: what it keeps too many is trained later.
        """
        again = self.again
        unfinished = tuple(group for group in self.unfinished if group.group_id not in again)
        prompts = max(0, self.config.generate_batch_size - len(unfinished) - len(again)) if self.may_draw else 0
        in_flight = prompts + len(unfinished) + len(again)
        return Draw(
            iteration=self.iteration,
            oldest_version=self.iteration - self.config.rollout_lag,
            cursor=self.cursor,
            prompts=prompts,
            round=len(self.rounds),
            recorded=frozenset(part.path for played in self.rounds for part in played.parts),
            unfinished=unfinished,
            again=again,
            wanted=self._wanted(in_flight) if self.config.carries_unfinished else None,
        )

    def _wanted(self, in_flight: int) -> int:
        """How many groups to wait for: those that are missing, and as many more as will be rejected, by what was so far.

        But for what is missing in any case, no more than half of those in flight: the slow ones are not waited for.
        """
        missing = self.config.rollout.batch_size - len(self.selected)
        share = self.counts.kept_share if self.rounds else 1.0
        expected = math.ceil(missing / share) if share else in_flight
        return max(missing, min(expected, in_flight // 2))

    def judged(self, outcome: RolloutOutcome, scored: Scored) -> Round:
        """The next round, from what was sampled and scored."""
        return Round(
            iteration=self.iteration,
            number=len(self.rounds),
            epoch=self.cursor.epoch,
            cursor_out=outcome.cursor,
            drawn=outcome.drawn,
            verdicts={group: str(verdict(scores, self.config)) for group, scores in scored.scores.items()},
            places=outcome.places,
            parts=outcome.parts,
            scored=asdict(scored),
            tally=asdict(outcome.tally),
            resumed_groups=outcome.resumed_groups,
            oldest_versions={
                group: version for group, version in outcome.oldest_versions.items() if version < self.iteration
            },
            unfinished=outcome.unfinished,
            again=self.again,
        )

    def check(self) -> None:
        """Refuse a batch that must not be trained.

        Raises:
            RunFailedError: it has no group (but the last batch of a run may be empty), or the rounds were used up and
                ``algo.dynamic_filtering_on_limit`` is ``stop``. The message has the counts.
        """
        algo, found = self.config.algo, len(self.selected)
        if self.is_full or (self.at_end and (found or self.iteration)):
            return
        if found and not self.at_end and algo.dynamic_filtering_on_limit == "train":
            return
        message = f"iteration {self.iteration}: {found} of {self.config.rollout.batch_size} groups after "
        message += "all prompts" if self.at_end else f"{len(self.rounds)} rounds"
        message += " (algo.dynamic_filtering_max_rounds)" if self.at_limit and not self.at_end else ""
        message += f": {self.counts}{_reasons(self.rounds)}"
        if algo.dynamic_filtering_enable:
            low, high = algo.dynamic_filtering_range
            message += (
                f"; kept are groups with a mean score between {low:g} and {high:g} (algo.dynamic_filtering_range) and some "
                "spread: give prompts that the policy solves sometimes, or a wider range"
            )
        raise RunFailedError(message)

    def body(self) -> dict[str, Any]:
        """What the manifest of the rollout says of it."""
        counts = self.counts
        return {
            "cursor_in": asdict(self.cursor_in),
            "cursor_out": asdict(self.cursor),
            "drawn": sum(played.drawn for played in self.rounds),
            "resumed_groups": sum(played.resumed_groups for played in self.rounds),
            "rounds": len(self.rounds),
            "carried": len(self.carried) + len(self.carried_unfinished),
            "selected": [asdict(group) for group in self.selected],
            "buffered": [asdict(group) for group in self.buffered],
            "unfinished": [asdict(group) for group in self.unfinished],
            "filtered": counts.filtered,
            "failed": counts.failed,
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Numbers of the rollout; an iteration that only trains what was left over samples nothing."""
        counts = self.counts
        metrics = {
            "rollout/batch_groups": float(len(self.selected)),
            "filter/rounds": float(len(self.rounds)),
            **self._pipeline_metrics(),
        }
        if not self.rounds:
            return metrics
        scores = [
            score for played in self.rounds for of_group in played.scored["scores"].values() for score in of_group
        ]
        tally = sum((RolloutTally(**played.tally) for played in self.rounds), RolloutTally())
        return {
            **metrics,
            **self._tally_metrics(tally),
            **({"filter/score_mean": float(np.mean(scores))} if scores else {}),
            "filter/generated": float(counts.generated),
            "filter/kept_share": counts.kept_share,
            "filter/too_low": float(counts.too_low),
            "filter/too_high": float(counts.too_high),
            "filter/no_spread": float(counts.no_spread),
            "filter/failed": float(counts.failed),
        }

    def _tally_metrics(self, tally: RolloutTally) -> dict[str, float]:
        """Without the speed where groups go on between two rollouts: not all tokens were sampled while one was awaited."""
        metrics = tally.metrics()
        if self.config.carries_unfinished:
            del metrics["rollout/tokens_per_second"]
        return metrics

    def _pipeline_metrics(self) -> dict[str, float]:
        """Groups that live longer than an iteration, where the pipeline has any."""
        metrics: dict[str, float] = {}
        again = {group_id for played in self.rounds for group_id in played.again}
        if self.config.max_age is not None:
            metrics["staleness/requeued_groups"] = float(len(again))
        if self.config.carries_unfinished:
            finished = {group_id for played in self.rounds for group_id in played.verdicts}
            gone_on_with = {group.group_id for group in self.carried_unfinished} & finished
            metrics["rollout/continued_groups"] = float(len(gone_on_with - again))
            metrics["rollout/unfinished_groups"] = float(len(self.unfinished))
        return metrics


def verdict(scores: Sequence[float], config: Config) -> Verdict:
    """What becomes of a group with these scores of its usable samples."""
    if not scores:
        return Verdict.FAILED
    if not config.algo.dynamic_filtering_enable:
        return Verdict.KEPT
    return judge_group(scores, *config.algo.dynamic_filtering_range)


def kept_groups(played: Round) -> list[KeptGroup]:
    """The kept groups of a round, in the order they were drawn: that of their ids."""
    return [
        KeptGroup(
            group_id,
            PromptCursor.of_group(group_id).epoch,
            played.iteration,
            played.number,
            played.oldest_versions.get(group_id, played.iteration),
        )
        for group_id, found in sorted(played.verdicts.items())
        if found == Verdict.KEPT
    ]


def _reasons(rounds: Sequence[Round]) -> str:
    """Why samples have no reward, the commonest first."""
    counted: dict[str, int] = {}
    for played in rounds:
        for reason, count in played.scored["failures"].items():
            counted[reason] = counted.get(reason, 0) + count
    commonest = sorted(counted.items(), key=lambda item: -item[1])[:3]
    return f"; failures: {commonest}" if commonest else ""
