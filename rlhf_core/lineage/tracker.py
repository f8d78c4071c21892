"""The interface of a tracker. Calls block; every one is idempotent, so that a retry tells the same story once.

::

    MLflow                           metrics, and what was made from what
    TensorBoard, Weights & Biases    metrics only: ``MetricTracker`` leaves the rest out
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError, RlhfError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rlhf_core.lineage.registry import ModelCheckpoint


class TrackerError(RlhfError, ConnectionError):
    """A tracker did not take what it was told."""


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
    parents: Mapping[str, str]  # every model of the run by role: its name, or the URL of another run's checkpoint
    manifests: Sequence[str]  # URIs of the trajectory manifests it was trained on
    metrics: Mapping[str, float]  # of its evaluation, where there is one
    ended_at: float  # of the evaluation, or of the checkpoint without one; unix seconds
    exported: ModelCheckpoint | None = None  # for the registry; None without an exported model


@dataclass(frozen=True, slots=True)
class BestRecord:
    """Which of the run's checkpoints is the best."""

    name: str  # of its CheckpointRecord
    version: int
    metric: str
    value: float


class Tracker(Protocol):
    """Somewhere that remembers runs."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin, or find, the tracker's run of ``run_id``."""
        ...

    def logged_iterations(self) -> int:
        """Iterations that have been told completely."""
        ...

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """Tell an iteration that ended at ``ended_at`` (unix seconds); ``logged_iterations`` is ``iteration + 1`` then."""
        ...

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Tell an evaluation of a policy version."""
        ...

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Tell a checkpoint."""
        ...

    def log_deleted(self, run_url: str, kept: Collection[int]) -> None:
        """Tell that of the run's checkpoints only those of the policy versions ``kept`` are still there."""
        ...

    def log_best(self, record: BestRecord) -> None:
        """Mark the best checkpoint; the one that was it before is not any more."""
        ...

    def log_report(self, page: str) -> str | None:
        """Keep the run's report, an HTML page, in place of an older one. Returns where people can read it."""
        ...

    def finish(self, succeeded: bool) -> None:
        """The run has ended."""
        ...

    def close(self) -> None:
        """Free what the tracker holds in this process; whoever still waits in a call of it gets an error. May be repeated."""
        ...

    @property
    def url(self) -> str | None:
        """A page for people."""
        ...


class MetricTracker:
    """What a tracker of metrics leaves out."""

    url: str | None = None

    def log_checkpoint(self, record: CheckpointRecord) -> None:
        """Nothing."""

    def log_deleted(self, run_url: str, kept: Collection[int]) -> None:
        """Nothing."""

    def log_best(self, record: BestRecord) -> None:
        """Nothing."""

    def log_report(self, page: str) -> str | None:
        """Nowhere."""

    def close(self) -> None:
        """Nothing."""


class NoTracker(MetricTracker):
    """Where no tracker is configured: the log in storage is all there is."""

    name = "no tracker"

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Nothing."""

    def logged_iterations(self) -> int:
        """Everything there could be."""
        return 2**31

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """Nothing."""

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Nothing."""

    def finish(self, succeeded: bool) -> None:
        """Nothing."""


def make_tracker(uri: str | None, experiment: str, model: str | None = None) -> Tracker:
    """MLflow at ``uri``, or nothing.

    Args:
        uri: of the tracking server.
        experiment: its name there.
        model: the registered model whose versions the checkpoints become; None: they become none.

    Raises:
        ConfigError: the URI holds a credential: it would stand in logs, errors and links.
    """
    if uri is None:
        return NoTracker()
    check_tracking_uri(uri)
    from rlhf_core.lineage.mlflow.tracker import MlflowTracker  # imports mlflow, which takes seconds

    return MlflowTracker(uri, experiment, model)


def check_tracking_uri(uri: str) -> None:
    """Refuse one with a credential in it; ``ConfigError`` says what to do instead."""
    if "@" in urlsplit(uri).netloc:
        raise ConfigError(
            "the MLflow URI holds a user or a password: remove them, and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
