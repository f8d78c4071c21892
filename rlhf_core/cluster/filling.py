"""Filling a batch in rounds: dynamic filtering with replacement (DAPO, arXiv:2503.14476), and over-sampling.

::

    left over by earlier iterations ─┐
                                     ├─▶ the first rollout.batch_size groups: this batch, the others wait for the next
    round 0, 1, … ─▶ kept groups ────┘
          └──▶ filtered, failed: counted, never trained

A round is drawn while groups are missing, unless the data ends, the epoch of the batch's groups ends (batches do not
cross epochs), or the limit of rounds is reached. Everything here is a pure function of the recorded rounds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.algorithms.filtering import FilterCounts, Verdict, judge_group
from rlhf_core.cluster.measures import RolloutTally
from rlhf_core.errors import RunFailedError
from rlhf_core.records import Draw, KeptGroup, PromptCursor, Round

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
    carried: tuple[KeptGroup, ...]  # left over by earlier iterations, oldest first
    cursor_in: PromptCursor
    rounds: tuple[Round, ...] = ()
    most_rounds: int | None = None  # of a replay: those that its source sampled; more cannot be had

    def with_round(self, played: Round) -> Filling:
        """The batch after one more round.

        Raises:
            RunFailedError: a prompt was drawn that had been drawn before.
        """
        known = {group.group_id for group in self.carried}.union(*(earlier.verdicts for earlier in self.rounds))
        again = sorted(known & played.verdicts.keys())
        # A round that a replay takes over may hold groups that had waited, and no new ones.
        drew = played.cursor_out > self.cursor or (self.most_rounds is not None and played.cursor_out == self.cursor)
        if again or not drew:
            raise RunFailedError(
                f"iteration {self.iteration}, round {played.number}: prompts are drawn twice: from {self.cursor} to "
                f"{played.cursor_out}, groups {again[:3]}"
            )
        return replace(self, rounds=(*self.rounds, played))

    @property
    def cursor(self) -> PromptCursor:
        """Where the next draw begins."""
        return self.rounds[-1].cursor_out if self.rounds else self.cursor_in

    @property
    def kept(self) -> tuple[KeptGroup, ...]:
        """Every group that may be trained: those left over first, then in the order they were drawn."""
        return (*self.carried, *(group for played in self.rounds for group in kept_groups(played)))

    @property
    def selected(self) -> tuple[KeptGroup, ...]:
        """The groups of this batch."""
        return self.kept[: self.config.rollout.batch_size]

    @property
    def buffered(self) -> tuple[KeptGroup, ...]:
        """The groups left to the next batch."""
        return self.kept[self.config.rollout.batch_size :]

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
    def at_end(self) -> bool:
        """True if nothing more can be drawn for this batch: the data ends, or the epoch of the groups it has.

        What the source of a replay did not sample for this batch cannot be drawn later either.
        """
        if self.most_rounds is not None:
            return len(self.rounds) >= self.most_rounds
        epoch = self.cursor.epoch
        return epoch >= self.config.train.num_episodes or any(group.epoch != epoch for group in self.kept[:1])

    @property
    def at_limit(self) -> bool:
        """True if no further round is allowed."""
        return len(self.rounds) >= self.config.algo.dynamic_filtering_max_rounds

    @property
    def is_broken(self) -> bool:
        """True if everything failed, a whole round's worth: more rounds would only fail too."""
        counts = self.counts
        return not self.kept and counts.failed == counts.generated >= self.config.generate_batch_size

    @property
    def needs_round(self) -> bool:
        """True if groups are missing and may still be drawn."""
        return not (self.is_full or self.at_end or self.at_limit or self.is_broken)

    @property
    def next_draw(self) -> Draw:
        """What the next round samples. A full round also for few missing groups: what it keeps too many is trained later."""
        return Draw(
            iteration=self.iteration,
            version=self.iteration,
            cursor=self.cursor,
            prompts=self.config.generate_batch_size,
            round=len(self.rounds),
            recorded=frozenset(part.path for played in self.rounds for part in played.parts),
        )

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
            "carried": len(self.carried),
            "selected": [asdict(group) for group in self.selected],
            "buffered": [asdict(group) for group in self.buffered],
            "filtered": counts.filtered,
            "failed": counts.failed,
            "metrics": self.metrics(),
        }

    def metrics(self) -> dict[str, float]:
        """Numbers of the rollout; an iteration that only trains what was left over samples nothing."""
        counts = self.counts
        metrics = {"rollout/batch_groups": float(len(self.selected)), "filter/rounds": float(len(self.rounds))}
        if not self.rounds:
            return metrics
        scores = [
            score for played in self.rounds for of_group in played.scored["scores"].values() for score in of_group
        ]
        tally = sum((RolloutTally(**played.tally) for played in self.rounds), RolloutTally())
        return {
            **metrics,
            **tally.metrics(),
            **({"filter/score_mean": float(np.mean(scores))} if scores else {}),
            "filter/generated": float(counts.generated),
            "filter/kept_share": counts.kept_share,
            "filter/too_low": float(counts.too_low),
            "filter/too_high": float(counts.too_high),
            "filter/no_spread": float(counts.no_spread),
            "filter/failed": float(counts.failed),
        }


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
        KeptGroup(group_id, played.epoch, played.iteration, played.number)
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
