"""The best checkpoint (``ckpt.best_metric_key``): which version it is, and what the log still lacks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.storage import Best, CheckpointStore, best_after, best_pointer

if TYPE_CHECKING:
    from collections.abc import Collection

    from tasks.run import AnyRun


def best_of(run: AnyRun, version: int) -> Best | None:
    """The best version up to ``version``, by the recorded evaluations; None where nobody asks for one."""
    ckpt = run.config.ckpt
    if ckpt.best_metric_key is None:
        return None
    return best_after(run.store, version, ckpt.best_metric_key, ckpt.best_metric_mode)


def is_best(run: AnyRun, version: int) -> bool:
    """True if ``version`` has been evaluated and is the best so far: then it is saved."""
    best = best_of(run, version)
    return best is not None and best.version == version


def is_saved(run: AnyRun, version: int) -> bool:
    """True if ``version`` has a complete checkpoint and, where it is the best, ``best.json`` says so."""
    if CheckpointStore(run.store).get(version) is None:
        return False
    best = best_of(run, version)
    return best is None or best.version != version or best == best_pointer(run.store)


def require_best_metric(run: AnyRun, metrics: Collection[str]) -> None:
    """Refuse an evaluation that cannot say which checkpoint is the best.

    Raises:
        ConfigError: it has no ``ckpt.best_metric_key``. The message names what it has.
    """
    key = run.config.ckpt.best_metric_key
    if key is not None and key not in metrics:
        raise ConfigError(
            f"ckpt.best_metric_key={key!r}: the evaluation gives no such metric: use one of {', '.join(sorted(metrics))}"
        )
