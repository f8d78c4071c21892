"""Resident memory over a long run: what leaks shows after hundreds of iterations, not in one.

::

    a run of the tiny model ─▶ after each iteration: resident bytes of each kind of process, and of Ray's object store
                                   └─▶ line through all from --settled on ─▶ growth, MiB in 100 iterations

The ratio is the largest of (fitted size at the end / fitted size at --settled) over the kinds of processes; 1.05 is the
number to hold. Iterations are small, so that they are many: what is kept for each is the same for large ones, or in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from benchmarks.process_time import role_of

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 2**20
STORE = "object store"
SMALL = [
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "eval.dataset=[]",
    "run.cpu_threads=1",
]

Samples = dict[str, dict[int, float]]
"""kind -> completed iterations -> MiB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--settled", type=int, default=20, help="iterations that do not count")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the configuration on top")
    arguments = parser.parse_args()
    from rlhf_cli.here import prefect_here

    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as root, prefect_here():
        samples = asyncio.run(observe(arguments.iterations, arguments.set, root))
        from rlhf_core.cluster.connect import disconnect

        disconnect()
    figures = {kind: fit(by_iteration, arguments.settled) for kind, by_iteration in samples.items()}
    tell(figures)
    if arguments.json:
        ratio = max(figure["end"] / figure["settled"] for figure in figures.values() if figure["settled"])
        body = {"name": "memory", "ratio": ratio, "hold": 1.05, "figures": figures, "samples": samples}
        Path(arguments.json).write_text(json.dumps(body, indent=1) + "\n")


async def observe(iterations: int, overrides: list[str], root: str) -> Samples:
    """A run, and what its processes hold after each iteration."""
    from flows.train import train
    from rlhf_core.storage import RunStore

    run_id = f"memory-{time.time_ns()}"
    episodes = -(-iterations * 4 // 320)
    length = [f"train.max_iterations={iterations}", f"train.num_episodes={episodes}", "ckpt.save_steps=50"]
    changed = [*SMALL, *length, f"storage.root={root}", *overrides]
    running = asyncio.create_task(train("configs/grpo_tiny_cpu.yaml", changed, run_id, "never"))
    samples: Samples = {}
    while not running.done():
        await asyncio.wait([running], timeout=0.5)
        done = len(RunStore(run_id, root).completed_iterations())
        if done:
            for kind, mib in resident().items():
                samples.setdefault(kind, {})[done] = mib
    await running
    return samples


def resident() -> dict[str, float]:
    """MiB now, by kind of process: this one, and all below it; and what Ray's object store holds."""
    import ray

    own = psutil.Process()
    found = {"controller": own.memory_info().rss / MIB}
    for process in own.children(recursive=True):
        try:
            kind, mib = role_of(process), process.memory_info().rss / MIB
        except psutil.Error:
            continue  # it just ended
        found[kind] = found.get(kind, 0.0) + mib
    if ray.is_initialized():
        name = "object_store_memory"
        found[STORE] = (ray.cluster_resources().get(name, 0.0) - ray.available_resources().get(name, 0.0)) / MIB
    return found


def fit(by_iteration: Mapping[int, float], settled: int) -> dict[str, float]:
    """The line through what was seen from ``settled`` on: MiB at its ends, and its slope in 100 iterations."""
    points = [(k, mib) for k, mib in by_iteration.items() if k >= settled]
    if len(points) < 2:
        return {"settled": 0.0, "end": 0.0, "slope": 0.0}
    slope, offset = np.polyfit(*zip(*points, strict=True), 1)
    ends = {"settled": offset + slope * settled, "end": offset + slope * points[-1][0]}
    return {**{name: float(mib) for name, mib in ends.items()}, "slope": float(100 * slope)}


def tell(figures: Mapping[str, Mapping[str, float]]) -> None:
    """The table."""
    print(f"{'MiB':<24}{'settled':>10}{'end':>10}{'in 100 iterations':>20}")
    for kind, figure in sorted(figures.items(), key=lambda item: -item[1]["end"]):
        if figure["end"] >= 1 or kind == STORE:
            print(f"{kind:<24}{figure['settled']:>10.0f}{figure['end']:>10.0f}{figure['slope']:>+20.1f}")


if __name__ == "__main__":
    main()
