"""The interface of a tracker. Calls block; every one is idempotent, so that a retry tells the same story once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """An input of the run: the trajectories of an iteration."""

    name: str
    uri: str  # of the manifest
    digest: str  # sha256 of the manifest
    context: str  # what it was used for


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A model the run made."""

    name: str
    version: int
    uri: str
    digest: str  # of the weights
    parent: str  # what training started from
    manifests: Sequence[str]  # URIs of the trajectory manifests it was trained on
    metrics: Mapping[str, float]  # of its evaluation, where there is one


class Tracker(Protocol):
    """Somewhere that remembers runs."""

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin, or find, the tracker's run of ``run_id``."""
        ...

    def logged_iterations(self) -> int:
        """Iterations that have been told completely."""
        ...

    def log_iteration(self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord]) -> None:
        """Tell an iteration; afterwards ``logged_iterations`` is at least ``iteration + 1``."""
        ...

    def log_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Tell an evaluation of a policy version."""
        ...

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Tell a checkpoint."""
        ...

    def finish(self, succeeded: bool) -> None:
        """The run has ended."""
        ...

    @property
    def url(self) -> str | None:
        """A page for people."""
        ...


class NoTracker:
    """Where no tracker is configured: the log in storage is all there is."""

    url: str | None = None

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Nothing."""

    def logged_iterations(self) -> int:
        """Everything there could be."""
        return 2**31

    def log_iteration(self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord]) -> None:
        """Nothing."""

    def log_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Nothing."""

    def finish(self, succeeded: bool) -> None:
        """Nothing."""


def make_tracker(uri: str | None, experiment: str) -> Tracker:
    """MLflow at ``uri``, or nothing."""
    if uri is None:
        return NoTracker()
    from rlhf_core.lineage.mlflow_tracker import MlflowTracker  # imports mlflow, which takes seconds

    return MlflowTracker(uri, experiment)
