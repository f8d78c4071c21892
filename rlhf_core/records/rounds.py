"""A batch that is filled in rounds: what a round asks for, what it leaves behind, and where a kept group lies.

::

    Draw ──▶ sampled, scored, judged ──▶ Round (durable) ──kept groups──▶ batch of this iteration, or of a later one
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_core.records.prompt import PromptCursor
from rlhf_core.records.stage import Part


@dataclass(frozen=True, slots=True)
class Draw:
    """Which prompts to sample, and as what."""

    iteration: int
    version: int  # of the policy that speaks
    cursor: PromptCursor
    prompts: int  # fewer come at the end of an epoch
    round: int = 0
    recorded: frozenset[str] = frozenset()  # paths of the iteration's parts that belong to earlier rounds


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group that is trained or waits for it, and the round that holds its rows and rewards."""

    group_id: str
    epoch: int  # that drew its prompt
    iteration: int
    round: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round, written once, when all its groups are sampled, scored and judged."""

    iteration: int
    number: int  # from 0, within the iteration
    epoch: int
    cursor_out: PromptCursor
    drawn: int
    verdicts: dict[str, str]  # group -> algorithms.filtering.Verdict
    places: dict[str, str]  # group -> path of the part with its rows
    parts: tuple[Part, ...]
    scored: dict[str, Any]  # what the scoring gave, as JSON: reward parts, metrics, failures, scores by group
    tally: dict[str, Any] = field(default_factory=dict)  # what the sampling counted, as JSON
    resumed_groups: int = 0  # found published by an earlier attempt
    user_code: dict[str, str] = field(default_factory=dict)  # the user's Python files that scored it -> sha256

    @property
    def reward_parts(self) -> tuple[Part, ...]:
        """The shards with the rewards of its groups."""
        return tuple(Part(**part) for part in self.scored["parts"])

    def parts_of(self, group_ids: set[str]) -> list[Part]:
        """The parts that hold rows of these groups."""
        paths = {self.places[group_id] for group_id in group_ids}
        return [part for part in self.parts if part.path in paths]

    def to_json(self) -> dict[str, Any]:
        """A plain JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Round:
        """The inverse of ``to_json``."""
        fields = dict(data)
        fields["cursor_out"] = PromptCursor(**fields["cursor_out"])
        fields["parts"] = tuple(Part(**part) for part in fields["parts"])
        return cls(**fields)
