"""Weights & Biases, spoken to by a process of its own.

::

    controller ──{"start": …} {"log": …} {"finish": …}──▶ process ── package wandb ── wandb-core ──▶ server, or files alone
               ◀──{"answer": …} | {"error": text}────────

Each message has a time limit; a process that does not keep it is killed, and what it should have sent is told again by the
next one, from the run's log. So a server that is away costs the run nothing, and nothing of ``wandb`` (threads, hooks at the
interpreter's end) lives in the controller.

The run's id names the run at W&B too. A resumed one goes on where the server says that it ended; offline, where each attempt
has a folder of its own (``wandb sync`` sends them), where the files do: W&B writes them out every 15 seconds, so an attempt
that was killed had said more. ``told.json`` remembers it of folders that were sent and removed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rlhf_core.lineage.told import Told
from rlhf_core.lineage.tracker import MetricTracker, TrackerError
from rlhf_core.processes.owned import OwnedProcess
from rlhf_core.processes.wire import encode, receive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rlhf_core.config.model import WandbConfig
    from rlhf_core.lineage.tracker import DatasetRecord

INIT_SECONDS = 30.0  # that the server may take to know the run
UPLOAD_SECONDS = 30.0  # that it may take for what is left at the end
LOG_SECONDS = 10.0  # wandb only writes to a file and a queue
GRACE_SECONDS = 15.0  # for the process to say that a limit was not kept, before it is killed


class WandbTracker(MetricTracker):
    """See ``Tracker``.

    Args:
        settings: ``logger.wandb``.
        folder: of wandb's files.
    """

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._process: OwnedProcess | None = None
        self._files = ""  # of this attempt

    def start(self, run_id: str, config: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Begin the run, or go on with it."""
        self.close()
        folder = self._folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._told = Told.read(folder / f"{run_id}.told.json")
        self._process = OwnedProcess("rlhf_core.lineage.wandb.process")
        settings = self._settings
        begun = self._ask(
            {
                "start": {
                    "id": run_id,
                    "name": run_id,
                    "project": settings.project,
                    "entity": settings.org,
                    "group": settings.group,
                    "mode": settings.mode,
                    "dir": str(self._folder),
                    "config": {**config, "lineage": dict(tags)},
                },
                "seconds": {"init": INIT_SECONDS, "finish": UPLOAD_SECONDS},
            },
            INIT_SECONDS + GRACE_SECONDS,
        )
        self.url, self._files = begun["url"], begun["files"]
        told = begun["told"]
        if settings.mode == "offline":
            told = {name: max(value, getattr(self._told, name)) for name, value in told.items()}
        self._told.save(**told)  # online the server knows better than a file of this machine

    def logged_iterations(self) -> int:
        """Iterations that the server, or the files, have."""
        return self._told.iterations

    def log_iteration(
        self, iteration: int, metrics: Mapping[str, float], inputs: Sequence[DatasetRecord], ended_at: float
    ) -> None:
        """A row with the iteration's number; the x axis of all its metrics."""
        self._log({**metrics, "iteration": iteration, "ended_at": ended_at})
        self._told.iterations = iteration + 1

    def log_evaluation(self, version: int, metrics: Mapping[str, float], ended_at: float) -> None:
        """A row with the version's number; the x axis of its metrics."""
        if version > self._told.evaluated:
            self._log({**metrics, "eval/version": version, "eval/ended_at": ended_at})
            self._told.evaluated = version

    def finish(self, succeeded: bool) -> None:
        """Wait until the server has everything, for a while."""
        self._ask({"finish": 0 if succeeded else 1}, UPLOAD_SECONDS + GRACE_SECONDS)
        self._told.save()
        self.close()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _log(self, row: Mapping[str, float]) -> None:
        self._ask({"log": dict(row)}, LOG_SECONDS)

    def _ask(self, message: dict[str, Any], seconds: float) -> Any:
        """One message, one answer.

        Raises:
            TrackerError: wandb refused it, or said nothing for so long; the process is gone then.
        """
        process = self._process
        if process is None:
            raise TrackerError("the run at Weights & Biases is not started: call start() first")
        process.output.read()  # drained: who prints into a full pipe stands still
        try:
            process.channel.settimeout(seconds)
            process.channel.sendall(encode(message))
            answer = receive(process.channel)
        except (OSError, ValueError) as error:  # a time limit is one
            answer = {"error": f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else str(error)}
        if answer is None or "error" in answer:
            self.close()
            said = process.output.take()
            if answer is None:
                answer = {"error": f"its process {process.exit_text}; it said: {said or 'nothing'}"}
            kept = f"; what it did not get lies in {self._files} (wandb sync)" if self._files else ""
            raise TrackerError(
                f"Weights & Biases did not take {json.dumps(next(iter(message)))}: {answer['error']}{kept}"
            )
        return answer["answer"]
