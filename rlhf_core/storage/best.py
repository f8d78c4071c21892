"""The best checkpoint of a run: which version, by which evaluation metric.

::

    evaluation of v ─▶ better than the best so far? ─▶ save v ─▶ best in checkpoint.json ─▶ best.json

The state stands in every checkpoint and in ``best.json``. Both are looked at, and the later one counts: a crash between the two
writes, or a lost pointer, forgets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.storage.checkpoints import CheckpointStore
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from rlhf_core.storage.run_store import RunStore

logger = get_logger(__name__)

Mode = Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class Best:
    """The best version so far."""

    version: int
    value: float
    key: str  # the evaluation metric

    def beats(self, other: Best, mode: Mode) -> bool:
        """True if this one is better; on a tie the earlier version stays."""
        return self.value > other.value if mode == "max" else self.value < other.value


def best_pointer(store: RunStore) -> Best | None:
    """What ``best.json`` says."""
    return _best(store.pointer("best"))


def stored_best(store: RunStore) -> Best | None:
    """The best version as of the newest checkpoint; None if no evaluated version was saved yet."""
    newest = CheckpointStore(store).newest()
    known = [best_pointer(store), _best(newest[1].get("best")) if newest is not None else None]
    # It only ever moves to later versions.
    return max((best for best in known if best is not None), key=lambda best: best.version, default=None)


def best_after(store: RunStore, version: int, key: str, mode: Mode) -> Best | None:
    """The best version once the recorded evaluation of ``version`` counts too; None without any.

    Version 0, the model that training starts from, is no checkpoint and never the best one.
    """
    best, evaluation = stored_best(store), store.read_evaluation(version)
    if version == 0 or evaluation is None:
        return best
    if key not in evaluation["metrics"]:
        logger.warning("the evaluation of version %d has no %s: it cannot become the best checkpoint", version, key)
        return best
    candidate = Best(int(evaluation["version"]), float(evaluation["metrics"][key]), key)
    return candidate if best is None or candidate.beats(best, mode) else best


def _best(body: dict[str, Any] | None) -> Best | None:
    return None if body is None else Best(int(body["version"]), float(body["value"]), str(body["key"]))
