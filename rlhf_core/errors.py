"""The one tree of errors.

Each error is also a standard kind (``ValueError``, ``TimeoutError`` ...), so that code which knows nothing of this package
catches it too, and each is picklable: Ray carries it home unchanged. A message names the value, the place and the remedy; what
others say of it, it may quote: their words may hold a secret, which is masked.
"""

from __future__ import annotations

from rlhf_core.redaction import redact


class RlhfError(Exception):
    """Anything this system raises on purpose."""

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigError(RlhfError, ValueError):
    """A configuration that cannot work: raised before anything starts."""


class DataError(RlhfError, ValueError):
    """A prompt dataset that cannot be read, or a row of it that cannot be used."""


class StorageError(RlhfError, OSError):
    """An object store did not do what was asked within its limit."""


class CorruptShardError(StorageError):
    """A shard or manifest whose bytes are not those that were recorded. The message names the object."""


class ConflictError(StorageError, FileExistsError):
    """A write-once object exists already with other contents."""


class LeaseError(RlhfError, RuntimeError):
    """Another live process holds the run. The message names the owner."""


class RewardError(RlhfError, RuntimeError):
    """A reward source that cannot be used at all (a failed *sample* is a result, not an error)."""


class GenerationError(RlhfError, RuntimeError):
    """An engine failed a request, or answered one without what was asked for."""


class AgentError(RlhfError, RuntimeError):
    """An agent or environment of the user's failed, or answered what cannot be used: its sample is recorded as failed."""


class TrainingError(RlhfError, RuntimeError):
    """A training step that must not be applied, or a rank that cannot go on."""


class WeightSyncError(RlhfError, RuntimeError):
    """Weights did not arrive whole on an engine."""


class WorkerError(RlhfError, RuntimeError):
    """A worker process died or holds the wrong policy version."""


class ClusterLostError(RlhfError, ConnectionError):
    """The Ray cluster that this process had joined is gone, or another one took its address: another process must go on."""


class DeadlineError(RlhfError, TimeoutError):
    """A wait reached its limit. The message names what was waited for."""


class RunFailedError(RlhfError, RuntimeError):
    """The run stopped on purpose: too many failures in a row, or nothing left to train on."""


class RunStoppedError(RlhfError, RuntimeError):
    """The run was asked to end, and did so between two steps. The same run id goes on."""


class AgentDeadlineError(AgentError, DeadlineError):
    """An agent or environment did not answer within its limit, and was killed. The message names the key of the limit."""
