"""The log of a run: object store, Arrow shards, manifests, checkpoints, the lease, and questions to it.

The only place with pyarrow.
"""

from rlhf_core.storage.checkpoints import CheckpointStore, FileEntry
from rlhf_core.storage.lease import Lease, LeaseRecord, acquire, holder
from rlhf_core.storage.lease_owner import LeaseOwner
from rlhf_core.storage.object_store import ObjectStore
from rlhf_core.storage.query import trajectories
from rlhf_core.storage.run_store import RunStore
from rlhf_core.storage.shards import RewardRow

__all__ = [
    "CheckpointStore",
    "FileEntry",
    "Lease",
    "LeaseOwner",
    "LeaseRecord",
    "ObjectStore",
    "RewardRow",
    "RunStore",
    "acquire",
    "holder",
    "trajectories",
]
