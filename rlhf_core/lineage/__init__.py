"""What was made from what, told to a tracker. The log in object storage stays the truth; a tracker is a view of it."""

import rlhf_core.lineage.mlflow  # noqa: F401  before anything imports MLflow
from rlhf_core.lineage.ancestry import ModelOrigin, RunOrigin, ancestry, draw
from rlhf_core.lineage.environment import code_revision, machine, package_versions
from rlhf_core.lineage.metric_trackers import make_metric_trackers
from rlhf_core.lineage.names import metric_name
from rlhf_core.lineage.registry import Measured, ModelCheckpoint, ModelRegistry, ModelVersion, make_registry
from rlhf_core.lineage.tracker import (
    BestRecord,
    CheckpointRecord,
    DatasetRecord,
    MetricTracker,
    NoTracker,
    Tracker,
    TrackerError,
    make_tracker,
)
from rlhf_core.lineage.user_code import changed_code, user_code

__all__ = [
    "BestRecord",
    "CheckpointRecord",
    "DatasetRecord",
    "Measured",
    "MetricTracker",
    "ModelCheckpoint",
    "ModelOrigin",
    "ModelRegistry",
    "ModelVersion",
    "NoTracker",
    "RunOrigin",
    "Tracker",
    "TrackerError",
    "ancestry",
    "changed_code",
    "code_revision",
    "draw",
    "machine",
    "make_metric_trackers",
    "make_registry",
    "make_tracker",
    "metric_name",
    "package_versions",
    "user_code",
]
