"""A batch that is filled in rounds: what a round asks for, what it leaves behind, and where a kept group lies.

::

    Draw ──▶ sampled, scored, judged ──▶ Round (durable) ──kept groups──▶ batch of this iteration, or of a later one
     ▲                                    │                    └─ too old by the time they would be trained ─┐
     │                                    └─ unfinished groups: in flight still ─┐                           │
     └── go on with them, or begin anew what is too old ◀────────────────────────┴───────────────────────────┘

What a draw asks for follows from the recorded rounds alone. The id of a group is the place of its prompt in the order of
draws (``PromptCursor.group_id``), whenever and however often it is sampled.
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
    oldest_version: int  # of the policy that may speak; the newest is ``iteration``
    cursor: PromptCursor
    prompts: int  # fewer come at the end of an epoch
    round: int = 0
    recorded: frozenset[str] = frozenset()  # paths of the iteration's parts that belong to earlier rounds
    unfinished: tuple[OpenGroup, ...] = ()  # in flight: gone on with, or begun anew where nobody plays them any more
    again: tuple[str, ...] = ()  # groups to begin anew: what was sampled of them is too old
    wanted: int | None = None  # finished groups to wait for, among them all of ``again``; the others go on. None: all


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that was drawn and is not finished."""

    group_id: str
    since: int  # version of the policy when it was begun: none of its tokens is older


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A group that is trained or waits for it, and the round that holds its rows and rewards."""

    group_id: str
    epoch: int  # that drew its prompt
    iteration: int
    round: int
    oldest_version: int | None = None  # of its tokens; None in logs of old: its iteration

    @property
    def spoken_since(self) -> int:
        """The oldest policy version that spoke in it."""
        return self.iteration if self.oldest_version is None else self.oldest_version


@dataclass(frozen=True, slots=True)
class Round:
    """One round, written once, when all its groups are sampled, scored and judged."""

    iteration: int
    number: int  # from 0, within the iteration
    epoch: int  # of its draw
    cursor_out: PromptCursor
    drawn: int  # prompts, for the first time
    verdicts: dict[str, str]  # group -> algorithms.filtering.Verdict
    places: dict[str, str]  # group -> path of the part with its rows
    parts: tuple[Part, ...]
    scored: dict[str, Any]  # what the scoring gave, as JSON: reward parts, metrics, failures, scores by group
    tally: dict[str, Any] = field(default_factory=dict)  # what the sampling counted, as JSON
    resumed_groups: int = 0  # found published by an earlier attempt
    user_code: dict[str, str] = field(default_factory=dict)  # the user's Python files that scored it -> sha256
    oldest_versions: dict[str, int] = field(default_factory=dict)  # group -> that spoke, where before ``iteration``
    unfinished: tuple[OpenGroup, ...] = ()  # in flight still
    again: tuple[str, ...] = ()  # groups that were begun anew, because what had been sampled of them was too old

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
        fields["unfinished"] = tuple(OpenGroup(**group) for group in fields.get("unfinished", ()))
        fields["again"] = tuple(fields.get("again", ()))
        return cls(**fields)
