"""What the workflow costs: an iteration as a flow beside the same Ray calls in a bare loop.

::

    flow   Prefect flow run and tasks, shards, manifests, MLflow, artifacts
    bare   the same engine and trainer calls, rows passed in memory: no Prefect, no shards, no MLflow

Both sides have their own actors; iterations alternate. The ratio is flow / bare in seconds per iteration; 1.05 is the number to
hold, for iterations of 10 s and more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    from rlhf_cli.stack import Stack, use_stack

    stack = Stack.here()
    if not use_stack(stack):
        raise SystemExit("start the local stack first: rlhf up")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(arguments, root))


async def measure(arguments: argparse.Namespace, root: str) -> None:
    from prefect import flow

    from benchmarks.bare_loop import BareLoop
    from benchmarks.report import finish
    from flows.identity import run_child
    from flows.iteration import iteration_flow
    from rlhf_core.cluster.connect import disconnect
    from rlhf_core.config import load_config
    from tasks.lineage import track
    from tasks.run import opened

    config = load_config(
        "configs/grpo_tiny_cpu.yaml",
        [
            f"rollout.batch_size={arguments.prompts}",
            f"rollout.n_samples_per_prompt={arguments.samples}",
            f"rollout.max_new_tokens={arguments.tokens}",
            f"data.max_len={arguments.tokens + 96}",
            "data.prompt_dataset=configs/tasks/digits.py:prompts?count=640",
            "train.num_episodes=10",
            f"train.max_iterations={arguments.iterations + 1}",
            "ckpt.save_steps=1000",
            "eval.dataset=[]",
            f"storage.root={root}",
            "vllm.cpu_kv_cache_gib=1",
        ],
    )
    run_id = f"benchmark-{time.strftime('%H%M%S')}"
    flow_s: list[float] = []
    bare_s: list[float] = []

    @flow(name="benchmark-controller", persist_result=False)
    async def alternate() -> None:
        async with opened(config, run_id, "never") as run:
            await track(run_id)
            bare = BareLoop(config, run.session.context)
            await bare.start(run.plan.total_steps)
            for iteration in range(arguments.iterations + 1):
                start = time.perf_counter()
                parameters: dict[str, Any] = {"run_id": run_id, "iteration": iteration, "storage_root": run.store.root}
                await run_child(
                    iteration_flow, "iteration", f"{run_id}/{iteration:08d}", f"{run_id} {iteration}", parameters
                )
                flow_s.append(time.perf_counter() - start)
                start = time.perf_counter()
                await bare.iterate(iteration)
                bare_s.append(time.perf_counter() - start)
            bare.stop()

    await alternate()
    # The last iteration of the run also writes the final checkpoint, and the first one warms up: neither counts.
    sides = {"flow": flow_s[1:-1], "bare": bare_s[1:-1]}
    ratio = statistics.median(sides["flow"]) / statistics.median(sides["bare"])
    facts = {"samples": config.samples_per_iteration, "tokens_each": arguments.tokens}
    finish("controller", sides, ratio, "s/iteration", facts, arguments.json)
    disconnect()


if __name__ == "__main__":
    main()
