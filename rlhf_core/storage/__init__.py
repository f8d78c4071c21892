"""The log of a run: object store, Arrow shards, manifests, checkpoints, the lease, and questions to it.

The only place with pyarrow.
"""

from rlhf_core.storage.adoption import adopt_newest_checkpoint, adopt_parts, adopt_stage
from rlhf_core.storage.attempts import Attempt, Restart, begin_attempt, end_attempt, read_attempts, record_sync
from rlhf_core.storage.best import Best, best_after, best_pointer, stored_best
from rlhf_core.storage.checkpoints import CheckpointStore, FileEntry, Held
from rlhf_core.storage.lease import Lease, LeaseRecord, acquire, holder
from rlhf_core.storage.lease_owner import LeaseOwner
from rlhf_core.storage.object_store import ObjectStore
from rlhf_core.storage.query.trajectories import query_trajectories, trajectories
from rlhf_core.storage.rotation import Keep, rotate, surplus
from rlhf_core.storage.run_store import RunStore
from rlhf_core.storage.shards import RewardRow
from rlhf_core.storage.worlds import World, is_comparable, read_worlds, record_world, worlds_in_words

__all__ = [
    "Attempt",
    "Best",
    "CheckpointStore",
    "FileEntry",
    "Held",
    "Keep",
    "Lease",
    "LeaseOwner",
    "LeaseRecord",
    "ObjectStore",
    "Restart",
    "RewardRow",
    "RunStore",
    "World",
    "acquire",
    "adopt_newest_checkpoint",
    "adopt_parts",
    "adopt_stage",
    "begin_attempt",
    "best_after",
    "best_pointer",
    "end_attempt",
    "holder",
    "is_comparable",
    "query_trajectories",
    "read_attempts",
    "read_worlds",
    "record_sync",
    "record_world",
    "rotate",
    "stored_best",
    "surplus",
    "trajectories",
    "worlds_in_words",
]
