"""TensorBoard: the run's curves, in event files of its own folder.

::

    {logger.tensorboard_dir}/{run_id}/events.out.tfevents.….0      the first attempt: iterations 0 1 2 3
                                     events.out.tfevents.….2       a resumed one: 2 3 4 …, and "forget what was from 2 on"
                                     told.json                     how far the folder has been told

An attempt begins where ``told.json`` ends, which is written after the points are. What an attempt wrote beyond that, before it
was killed, is written again under TensorBoard's own mark of a restart, which hides the older points: none is drawn twice.

The writer of the package ``tensorboard`` alone is used: neither torch nor TensorFlow is loaded.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rlhf_core.lineage.told import Told
from rlhf_core.lineage.tracker import MetricTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.lineage.tracker import DatasetRecord


class TensorBoardTracker(MetricTracker):
    """See ``Tracker``. Names are those of the run's metrics, as in MLflow.

    Args:
        folder: ``logger.tensorboard_dir``.
    """

    name = "TensorBoard"

    def __init__(self, folder: str) -> None:
        self._root = Path(folder).absolute()
        self._writer: EventFileWriter | None = None

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Open a file of this attempt."""
        self.close()
        folder = self._root / run_id
        folder.mkdir(parents=True, exist_ok=True)
        self._told = Told.read(folder / "told.json")
        step = self._told.iterations
        self._told.evaluated = min(self._told.evaluated, step - 1)  # the mark hides those of later versions, too
        self._writer = EventFileWriter(str(folder), filename_suffix=f".{step}")
        self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)), time.time())
        self._writer.flush()

    def logged_iterations(self) -> int:
        """Iterations in the files."""
        return self._told.iterations

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """Scalars at step ``iteration``."""
        self._scalars(iteration, metrics, ended_at)
        self._told.save(iterations=iteration + 1)

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """Scalars at step ``version``."""
        if version > self._told.evaluated:
            self._scalars(version, metrics, ended_at)
            self._told.save(evaluated=version)

    def finish(self, succeeded: bool) -> None:
        """The files are whole."""
        self.close()

    def close(self) -> None:
        """End the writer and its thread."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _scalars(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in sorted(metrics.items())]
        self._add(Event(step=step, summary=Summary(value=values)), at)
        self._open.flush()

    def _add(self, event: Event, at: float) -> None:
        event.wall_time = at
        self._open.add_event(event)

    @property
    def _open(self) -> EventFileWriter:
        if self._writer is None:
            raise RuntimeError("the TensorBoard files are not open: call start() first")
        return self._writer
