"""What staleness costs in learning: the task "digits" with each pipeline, over the same seeds, as curves in one picture.

::

    sync               every token is of the version that is trained
    async              Q = 1: rollout k speaks with version k-1
    partial rollout    Q = 1: and what is in flight goes on with the new weights

The figures: the reward per iteration, its mean over the last quarter, and the iteration in which it first exceeds 0.8.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.async_overlap import PIPELINES
from rlhf_core.records import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEARNED = 0.8  # a reward at which the task counts as learned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--png", help="draw the curves here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    from rlhf_cli.here import prefect_here

    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as root, prefect_here():
        curves = asyncio.run(learn(arguments.seeds, arguments.iterations, root))
        from rlhf_core.cluster.connect import disconnect

        disconnect()
    tell(curves)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"name": "convergence", "seeds": arguments.seeds, "rewards": curves}, indent=1)
        )
    if arguments.png:
        draw(curves, arguments.png)


async def learn(seeds: Sequence[int], iterations: int, root: str) -> dict[str, list[list[float]]]:
    """Mean reward per iteration, by pipeline and seed."""
    from flows.train import train
    from rlhf_core.storage import RunStore

    curves: dict[str, list[list[float]]] = {name: [] for name in PIPELINES}
    for seed in seeds:
        for name, overrides in PIPELINES.items():
            run_id = f"{name}-{seed}-{time.time_ns()}"
            changed = [
                *overrides,
                f"train.seed={seed}",
                f"train.max_iterations={iterations}",
                "train.num_episodes=2",
                "eval.dataset=[]",
                "ckpt.save_steps=-1",
                f"storage.root={root}",
            ]
            await train("configs/grpo_tiny_cpu.yaml", changed, run_id, "never")
            store = RunStore(run_id, root)
            curves[name].append([_reward(store.stage(k, Stage.REWARD)) for k in store.completed_iterations()])
    return curves


def _reward(found: Any) -> float:
    return float(found[0].body["metrics"]["reward/mean"])


def tell(curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """The table."""
    print(f"{'pipeline':<10}  {'last quarter':>14}  learned in iteration, by seed")
    for name, of_seeds in curves.items():
        ends = [statistics.mean(curve[-max(1, len(curve) // 4) :]) for curve in of_seeds]
        learned = [next((str(k) for k, reward in enumerate(curve) if reward > LEARNED), "never") for curve in of_seeds]
        print(f"{name:<10}  {statistics.mean(ends):>14.3f}  {', '.join(learned)}")


def draw(curves: Mapping[str, Sequence[Sequence[float]]], path: str) -> None:
    """One line a pipeline, the mean over seeds, with their range around it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for name, of_seeds in curves.items():
        by_iteration = list(zip(*of_seeds, strict=True))
        iterations = range(len(by_iteration))
        axes.plot(iterations, [statistics.mean(rewards) for rewards in by_iteration], label=name)
        axes.fill_between(iterations, [min(r) for r in by_iteration], [max(r) for r in by_iteration], alpha=0.15)
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean reward")
    axes.set_title(f"digits, GRPO, mean and range of {len(next(iter(curves.values())))} seeds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
