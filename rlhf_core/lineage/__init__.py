"""What was made from what, told to a tracker. The log in object storage stays the truth; a tracker is a view of it."""

from rlhf_core.lineage.ancestry import ModelOrigin, RunOrigin, ancestry, draw
from rlhf_core.lineage.environment import code_revision, package_versions
from rlhf_core.lineage.names import metric_name
from rlhf_core.lineage.tracker import BestRecord, CheckpointRecord, DatasetRecord, NoTracker, Tracker, make_tracker

__all__ = [
    "BestRecord",
    "CheckpointRecord",
    "DatasetRecord",
    "ModelOrigin",
    "NoTracker",
    "RunOrigin",
    "Tracker",
    "ancestry",
    "code_revision",
    "draw",
    "make_tracker",
    "metric_name",
    "package_versions",
]
