"""A registry of models: the checkpoints of many runs of one task, and which of them is which.

::

    run A ─ checkpoints ─┐                             ┌ latest     the newest
                         ├─▶ versions 1, 2, 3, … of a ─┼ best       by the evaluation metric of its run; moves by itself
    run B ─ checkpoints ─┘   registered model          └ champion   moves by promotion only

Calls block. Every one is idempotent, and several runs may tell of their checkpoints at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from rlhf_core.lineage.tracker import check_tracking_uri

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Alias: TypeAlias = Literal["champion", "best", "latest"]
Mode: TypeAlias = Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What an evaluation gave."""

    metric: str
    value: float
    mode: Mode
    comparable: str  # digest of how it was measured: values compare only where it is the same

    def beats(self, other: Measured) -> bool:
        """True if this one is better; both were measured alike."""
        return self.value > other.value if self.mode == "max" else self.value < other.value


@dataclass(frozen=True, slots=True)
class ModelCheckpoint:
    """A checkpoint with an exported model."""

    run_id: str
    run_url: str
    policy_version: int
    uri: str
    digest: str  # of the weights
    measured: Measured | None = None  # by the run's ckpt.best_metric_key

    @property
    def spec(self) -> str:
        """Its name in a configuration."""
        return f"run:{self.run_url}@{self.policy_version}"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A version of the registered model."""

    number: int  # from 1
    checkpoint: ModelCheckpoint
    deleted: bool = False  # its files are gone


class ModelRegistry(Protocol):
    """The versions of one registered model."""

    def register(self, checkpoint: ModelCheckpoint, tracker_run: str, tracker_model: str) -> int:
        """The number of the checkpoint's version, made if there is none. ``best`` follows.

        Args:
            checkpoint: complete.
            tracker_run: the tracker's id of the run.
            tracker_model: the tracker's id of the checkpoint.
        """
        ...

    def mark_deleted(self, run_url: str, kept: Collection[int]) -> None:
        """Every version of the run other than the policy versions ``kept`` says that its files are gone."""
        ...

    def version(self, alias: Alias) -> ModelVersion | None:
        """Who has the alias."""
        ...

    def find(self, uri: str, digest: str) -> ModelVersion | None:
        """The version of a checkpoint."""
        ...

    def promote(self, number: int) -> None:
        """Make a version the champion."""
        ...

    def tag(self, number: int, tags: Mapping[str, str]) -> None:
        """Write on a version what became of it."""
        ...

    @property
    def url(self) -> str | None:
        """A page for people."""
        ...


def best_of(versions: Sequence[ModelVersion]) -> ModelVersion | None:
    """The best of those whose files are there, measured as the newest of them; on a tie the earlier one."""
    measured = [(v, v.checkpoint.measured) for v in sorted(versions, key=lambda v: v.number) if not v.deleted]
    known = [(version, value) for version, value in measured if value is not None]
    if not known:
        return None
    comparable = known[-1][1].comparable
    best, best_value = next((v, m) for v, m in known if m.comparable == comparable)
    for version, value in known:
        if value.comparable == comparable and value.beats(best_value):
            best, best_value = version, value
    return best


def make_registry(uri: str, model: str) -> ModelRegistry:
    """The registered model ``model`` of MLflow at ``uri``; it need not exist yet.

    Raises:
        ConfigError: the URI holds a credential.
    """
    check_tracking_uri(uri)
    from rlhf_core.lineage.mlflow.registry import MlflowRegistry  # imports mlflow, which takes seconds

    return MlflowRegistry(uri, model)
