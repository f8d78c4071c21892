"""What an export takes of a run, and the count of what it does not."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlhf_core.data.choosing import Candidate, Pairing, Ties, best_of, pairs_of
from rlhf_core.errors import DataError
from rlhf_core.records import Stage, StopReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlhf_core.records import RewardResult
    from rlhf_core.storage import RunStore
    from rlhf_core.storage.rescored import Rescoring

Format: TypeAlias = Literal["sft", "dpo", "hf"]
Key: TypeAlias = tuple[str, int]  # group, sample
Plan: TypeAlias = dict[int, list[tuple[Key, ...]]]  # iteration -> its examples, each of one sample or of two

# Why a sample is not in the dataset.
ROLLOUT_FAILED = "of failed rollouts"
NO_REWARD = "without a reward"
LOW_REWARD = "with a reward below --min-reward"
BLANK = "with a blank answer"
TURNS = "of several turns"
IMAGES = "with images"
OTHER_PROMPT = "whose prompt the agent wrote itself"
PARTNER = "whose pair lost the other answer"
NOT_CHOSEN = "not chosen"

_FAILED = (StopReason.ERROR, StopReason.ABORTED)
_COLUMNS = ["group_id", "sample_index", "segment_index", "prompt_id", "reward", "stop_reason", "answer"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is exported."""

    format: Format
    iterations: Sequence[int]
    where: str | None = None  # over the columns of ``rlhf trajectories``, with the run's own rewards
    best: int = 1  # sft: answers of each prompt
    ties: Ties = "newest"  # sft
    min_reward: float | None = None  # sft
    pairs: Pairing = "one"  # dpo
    margin: float = 0.0  # dpo: least difference of rewards
    plain_prompts: bool = False  # sft, dpo: the rendered prompt instead of its messages


@dataclass(slots=True)
class Tally:
    """What came of an export."""

    rows: int = 0
    samples: int = 0  # that ``where`` kept
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> samples
    answers: int = 0  # in the dataset, as text
    truncated: int = 0  # of them: cut off, and trained as if they had ended
    same_tokens: int = 0  # of them: their text gives the tokens that were sampled
    messages: bool = False  # the prompts are chat messages

    def to_json(self) -> dict[str, Any]:
        """A plain JSON object."""
        return {**asdict(self), "left_out": dict(self.left_out)}


class Selection:
    """The samples of a run that a choice is about, with the rewards that count."""

    def __init__(self, store: RunStore, choice: Choice, rescoring: Rescoring | None) -> None:
        self.store = store
        self.choice = choice
        self._rescoring = rescoring
        self.tally = Tally()

    def matching(self, iteration: int) -> dict[Key, dict[str, Any]]:
        """The samples that ``where`` keeps, by key: a readable row each."""
        from rlhf_core.storage import trajectories  # pyarrow, which importing this package must not load

        table = trajectories(self.store, iteration, self.choice.where, columns=_COLUMNS)
        # Of several segments the last one counts.
        listed = sorted(table.to_pylist(), key=lambda row: int(row["segment_index"]))
        rows = {(row["group_id"], row["sample_index"]): row for row in listed}
        self.tally.samples += len(rows)
        return rows

    def results(self, iteration: int) -> dict[Key, RewardResult]:
        """Results of the rescoring, else of the reward stage; empty where it is not complete."""
        if self._rescoring is not None:
            rows = self._rescoring.rewards(iteration)
        else:
            found = self.store.stage(iteration, Stage.REWARD)
            rows = [] if found is None else self.store.read_rewards(found[0].parts)
        return {(row.group_id, row.sample_index): row.result for row in rows}

    def plan(self) -> tuple[Plan, dict[tuple[int, Key], float]]:
        """The examples by iteration, and the rewards of their samples."""
        candidates = [one for iteration in self.choice.iterations for one in self._candidates(iteration)]
        examples: list[tuple[Candidate, ...]]
        if self.choice.format == "sft":
            examples = [(best,) for best in best_of(candidates, self.choice.best, self.choice.ties)]
        else:
            examples = list(pairs_of(candidates, self.choice.pairs, self.choice.margin))
        plan: Plan = {}
        rewards: dict[tuple[int, Key], float] = {}
        for example in examples:
            plan.setdefault(example[0].iteration, []).append(tuple(one.key for one in example))
            rewards |= {(one.iteration, one.key): one.reward for one in example}
        self.leave_out(NOT_CHOSEN, len(candidates) - len(rewards))
        return plan, rewards

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count samples that do not come into the dataset."""
        if count:
            self.tally.left_out[reason] += count

    def nothing(self) -> DataError:
        """The error of an export without a row."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.tally.left_out.most_common())
        asked = f" where {self.choice.where}" if self.choice.where is not None else ""
        return DataError(
            f"{self.store.url}: nothing to export as {self.choice.format} from {len(self.choice.iterations)} "
            f"iterations{asked}: {self.tally.samples} samples{f' ({reasons})' if reasons else ''}; nothing was written"
        )

    def _candidates(self, iteration: int) -> Iterator[Candidate]:
        rescored = self.results(iteration) if self._rescoring is not None else None
        for key, row in self.matching(iteration).items():
            reward = row["reward"]
            if rescored is not None:
                reward = rescored[key].reward if key in rescored else None
            reason = self._unfit(row, reward)
            if reason is not None:
                self.leave_out(reason)
                continue
            text = hashlib.blake2b(row["answer"].encode(), digest_size=8).digest()
            yield Candidate(iteration, *key, row["prompt_id"], reward, int.from_bytes(text, "big"))

    def _unfit(self, row: dict[str, Any], reward: float | None) -> str | None:
        if row["stop_reason"] in _FAILED:
            return ROLLOUT_FAILED
        if reward is None:
            return NO_REWARD
        if row["segment_index"]:
            return TURNS  # before answers compete: what wins has to be written
        least = self.choice.min_reward
        if least is not None and reward < least:
            return LOW_REWARD
        return BLANK if not row["answer"].strip() else None
