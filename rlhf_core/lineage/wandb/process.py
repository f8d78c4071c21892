"""The process that speaks to Weights & Biases for a run. See ``tracker``."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

from rlhf_core.lineage.wandb.files import told_offline
from rlhf_core.processes.lifeline import hold_lifeline
from rlhf_core.processes.wire import encode, receive


def main() -> None:
    """``python -m rlhf_core.lineage.wandb.process CHANNEL LIFELINE``."""
    hold_lifeline(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    run: Any = None
    while (message := receive(channel)) is not None:
        answer = None
        try:
            match message:
                case {"start": begin, "seconds": seconds}:
                    run, answer = _start(begin, seconds)
                case {"log": row}:
                    run.log(row)
                case {"finish": code}:
                    run.finish(exit_code=code)
        except Exception as error:  # noqa: BLE001  whatever it is: the controller decides
            channel.sendall(encode({"error": f"{type(error).__name__}: {error}"}))
        else:
            channel.sendall(encode({"answer": answer}))


def _start(begin: dict[str, Any], seconds: dict[str, float]) -> tuple[Any, dict[str, Any]]:
    import wandb

    online = begin["mode"] == "online"
    told = None if online else told_offline(Path(begin["dir"]), begin["id"])  # before there is a file of this attempt
    settings = wandb.Settings(
        init_timeout=seconds["init"],
        finish_timeout=seconds["finish"],
        finish_timeout_raises=True,
        console="off",  # this process says nothing, and the controller's words are not for it
        silent=True,
        disable_git=True,  # the run's own record has the revision
        x_disable_stats=True,  # of this process, which nobody wants to know
    )
    run = wandb.init(**begin, resume="allow", settings=settings)
    run.define_metric("eval/version")
    run.define_metric("eval/*", step_metric="eval/version", step_sync=False)
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration", step_sync=False)
    if told is None:
        summary = dict(run.summary)
        told = {"iterations": int(summary.get("iteration", -1)) + 1, "evaluated": int(summary.get("eval/version", -1))}
    return run, {"url": run.url if online else None, "files": run.settings.sync_dir, "told": told}


if __name__ == "__main__":
    main()
