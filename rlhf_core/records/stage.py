"""What a stage leaves behind: parts, a manifest that makes them count, and a small reference to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """The stages of an iteration, in their order."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    EXPERIENCE = "experience"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Part:
    """One immutable shard of a stage."""

    path: str  # relative to the run's root
    rows: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where each prompt of an iteration went. The law::

        drawn + carried == trained + filtered + failed + buffered

    Over a whole run nothing is carried in, so there it reads ``drawn == trained + filtered + failed + buffered``.
    """

    drawn: int = 0
    carried: int = 0  # kept by earlier iterations and not trained by them, or begun and not finished
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    buffered: int = 0  # kept and left to later iterations, or in flight

    @property
    def balanced(self) -> bool:
        """True if no prompt is lost or counted twice."""
        return self.drawn + self.carried == self.trained + self.filtered + self.failed + self.buffered

    def then(self, later: Ledger) -> Ledger:
        """This iteration (or all up to it) and the next one, as one."""
        return Ledger(
            drawn=self.drawn + later.drawn,
            carried=self.carried,
            trained=self.trained + later.trained,
            filtered=self.filtered + later.filtered,
            failed=self.failed + later.failed,
            buffered=later.buffered,
        )


@dataclass(frozen=True, slots=True)
class StageManifest:
    """Written once and last: its existence *is* the completion of the stage."""

    run_id: str
    iteration: int
    stage: Stage
    parts: tuple[Part, ...]
    rows: int
    tokens: int
    policy_version: int
    inputs: dict[str, str] = field(default_factory=dict)  # stage -> sha256 of the manifest this one was made from
    body: dict[str, Any] = field(default_factory=dict)  # what only this stage has: cursor, ledger, metrics, digest

    @property
    def selected(self) -> frozenset[str] | None:
        """The groups of a rollout that are trained; the others in its parts are not of this batch. None: all are."""
        listed = self.body.get("selected")
        return None if listed is None else frozenset(group["group_id"] for group in listed)

    def to_json(self) -> dict[str, Any]:
        """A plain JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageManifest:
        """The inverse of ``to_json``."""
        fields = dict(data)
        fields.pop("schema_version", None)
        fields["stage"] = Stage(fields["stage"])
        fields["parts"] = tuple(Part(**part) for part in fields["parts"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StageRef:
    """What a task hands on: where the manifest is and what it hashes to. Small JSON, never tensors."""

    run_id: str
    iteration: int
    stage: Stage
    path: str  # of the manifest, relative to the run's root
    sha256: str
    rows: int
    tokens: int
