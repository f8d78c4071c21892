"""Does each estimator learn? The task "share of digits in the answer" with a random model, one whole run an estimator.

::

    gae     configs/ppo_tiny_cpu.yaml, with a critic
    others  configs/grpo_tiny_cpu.yaml with algo.advantage.estimator=NAME, everything else as it is

Each is the flow `rlhf train` runs, with its own engine, ranks and log, one after the other; evaluation is off and there is one
checkpoint, at the end. The mean reward of iteration k is that of the policy after k updates. The ratio is the lowest last mean
reward / 0.9; 1.0 is the number to hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.algorithms.estimators import ESTIMATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage import RunStore

LEARNED = 0.9
HEADER = f"  {'estimator':<20} {'first':>6} {'last':>6} {'best':>6} {'updates to .9':>14} {'s/iteration':>12}"
# Medians of these; the stage "experience" holds the forward passes for log-probs and values.
COSTS = ("seconds/rollout", "seconds/experience", "update/seconds", "critic/seconds", "critic/memory_gib")


@dataclass(frozen=True)
class Learned:
    """What came of one run."""

    estimator: str
    config: str
    overrides: list[str]
    rewards: list[float]  # mean reward of each iteration
    seconds: list[float]  # from the start of each iteration to the start of the next
    costs: dict[str, float]  # medians over the iterations

    @property
    def updates_to_learn(self) -> int | None:
        """Updates after which the mean reward is above ``LEARNED`` for the first time."""
        return next((k for k, reward in enumerate(self.rewards) if reward > LEARNED), None)

    @property
    def line(self) -> str:
        """Of the table."""
        updates = "never" if self.updates_to_learn is None else self.updates_to_learn
        first, last, best = self.rewards[0], self.rewards[-1], max(self.rewards)
        return (
            f"  {self.estimator:<20} {first:>6.3f} {last:>6.3f} {best:>6.3f} {updates:>14} {self.median_seconds:>12.2f}"
        )

    @property
    def median_seconds(self) -> float:
        """Of an iteration."""
        return statistics.median(self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--estimators", nargs="+", choices=list(ESTIMATORS), default=list(ESTIMATORS))
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.iterations < 2:
        parser.error("--iterations: at least 2, for the time from one to the next")
    from rlhf_cli.stack import Stack, use_stack

    stack = Stack.here()
    served = use_stack(stack)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    with nullcontext() if served else stack.temporary_server(), tempfile.TemporaryDirectory() as root:
        from rlhf_core.cluster.connect import disconnect

        try:
            runs = asyncio.run(learn_all(arguments.estimators, arguments.iterations, arguments.seed, root))
        finally:
            disconnect()
    for run in runs:
        print(f"  {run.estimator}: {', '.join(f'{name} {value:.2f}' for name, value in run.costs.items())}")
    print(f"  ratio {ratio(runs):.3f}")
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(summary(runs, arguments.seed), indent=1))


async def learn_all(estimators: Sequence[str], iterations: int, seed: int, root: str) -> list[Learned]:
    """One run an estimator, one after the other."""
    from flows.train import train  # Prefect reads its settings as it is imported
    from rlhf_core.storage import RunStore

    runs = []
    print(HEADER, flush=True)
    for estimator in estimators:
        config, own = choose(estimator)
        run_id = f"estimator-{estimator}"
        overrides = [
            *own,
            f"train.seed={seed}",
            f"train.max_iterations={iterations}",
            "eval.dataset=[]",
            "ckpt.save_steps=-1",
        ]
        await train(config, [*overrides, f"storage.root={root}"], run_id, "never")
        runs.append(read(RunStore(run_id, root), estimator, config, overrides))
        print(runs[-1].line, flush=True)
    return runs


def choose(estimator: str) -> tuple[str, list[str]]:
    """Its file, and the keys on top."""
    if estimator == "gae":
        return "configs/ppo_tiny_cpu.yaml", []
    return "configs/grpo_tiny_cpu.yaml", [f"algo.advantage.estimator={estimator}"]


def read(store: RunStore, estimator: str, config: str, overrides: list[str]) -> Learned:
    """The curve of a finished run, from its log."""
    from rlhf_core.records import Stage
    from tasks.lineage import iteration_metrics

    iterations = store.completed_iterations()
    metrics = [iteration_metrics(store, k) for k in iterations]
    starts = [found[0].body["started_at"] for k in iterations if (found := store.stage(k, Stage.ROLLOUT)) is not None]
    return Learned(
        estimator=estimator,
        config=config,
        overrides=overrides,
        rewards=[of_iteration["reward/mean"] for of_iteration in metrics],
        seconds=[after - before for before, after in pairwise(starts)],
        costs={name: statistics.median(m[name] for m in metrics) for name in COSTS if name in metrics[-1]},
    )


def summary(runs: Sequence[Learned], seed: int) -> dict[str, object]:
    """What goes into the JSON."""
    each = {
        run.estimator: {
            **asdict(run),
            "updates_to_learn": run.updates_to_learn,
            "median_seconds": run.median_seconds,
        }
        for run in runs
    }
    return {"name": "estimators", "ratio": ratio(runs), "learned": LEARNED, "seed": seed, "runs": each}


def ratio(runs: Sequence[Learned]) -> float:
    return min(run.rewards[-1] for run in runs) / LEARNED


if __name__ == "__main__":
    main()
