"""What overlapping buys: the three pipelines on the same work, as whole runs.

::

    work       rollout and update                          pipelines
    balanced   take about the same time                    sync, async, async + partial rollout
    tailed     answers end when the model says so:         sync, async, async + partial rollout in which an iteration closes
               many short ones, a few at the limit         when its batch is full, and the rest goes on

Engine and trainer have one core each. The update is made as long as the rollout by ``train.max_epochs``, found in a first run.
Seconds are from the end of one update to the end of another, over all iterations but the first: start-up counts for nobody. The
ratio is async / sync of the balanced work; 0.70 is the number to hold. Of the tailed work alone: partial / async. Slots are
the samples that may be in flight; idle is the share of them that was empty between two updates.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf_core.records import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage import RunStore

WARM_UP = 1  # iterations that do not count
PIPELINES: dict[str, list[str]] = {
    "sync": [],
    "async": ["train.async_enable=true"],
    "partial": ["train.async_enable=true", "train.partial_rollout_enable=true"],
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, from the end of its first counted update to that of its last."""

    iteration_seconds: list[float]
    rollout_seconds: float  # median of an iteration
    training_seconds: float  # median of log-probs, update and what is between them
    tokens_per_second: float  # trained
    idle_share: float  # of the slots
    lag_mean: float  # versions, over trained tokens
    lag_max: float

    @property
    def seconds(self) -> float:
        """Of an iteration, over all that count."""
        return statistics.mean(self.iteration_seconds)

    def figures(self) -> dict[str, float]:
        """By column of the table."""
        return {
            "s/iteration": self.seconds,
            "rollout s": self.rollout_seconds,
            "training s": self.training_seconds,
            "tokens/s": self.tokens_per_second,
            "idle": self.idle_share,
            "lag mean": self.lag_mean,
            "lag max": self.lag_max,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--iterations", type=int, default=9, help="of each run, the first of which does not count")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer of the balanced work")
    parser.add_argument("--longest", type=int, default=1024, help="limit of the answers of the tailed work")
    parser.add_argument("--work", choices=["balanced", "tailed", "both"], default="both")
    arguments = parser.parse_args()
    from rlhf_cli.here import prefect_here

    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as root, prefect_here():
        asyncio.run(compare(arguments, root))
        from rlhf_core.cluster.connect import disconnect

        disconnect()


async def compare(arguments: argparse.Namespace, root: str) -> None:
    from benchmarks.report import finish_table

    runs: dict[str, Measured] = {}
    facts: dict[str, Any] = {"prompts": arguments.prompts, "samples": arguments.samples}
    if arguments.work in ("balanced", "both"):
        work = balanced_work(arguments)
        first = await measured_run(root, [*work, "train.max_iterations=4"], slots(arguments))
        epochs = max(1, round(first.rollout_seconds / first.training_seconds))
        facts |= {"tokens_each": arguments.tokens, "epochs": epochs}
        for name, overrides in PIPELINES.items():
            runs[f"balanced/{name}"] = await measured_run(
                root, [*work, f"train.max_epochs={epochs}", *overrides], slots(arguments)
            )
    if arguments.work in ("tailed", "both"):
        facts["longest"] = arguments.longest
        ahead = arguments.prompts * 3 // 2
        closing = [f"rollout.vllm_generate_batch_size={ahead}", "train.async_queue_size=4"]
        for name, overrides in PIPELINES.items():
            partial = name == "partial"
            runs[f"tailed/{name}"] = await measured_run(
                root,
                [*tailed_work(arguments), *overrides, *(closing if partial else [])],
                slots(arguments, ahead if partial else arguments.prompts),
            )
    above, below = ratio_of(arguments.work)
    facts["ratio_of"] = f"{above} / {below}"
    ratio = runs[above].seconds / runs[below].seconds
    finish_table("async_overlap", {name: run.figures() for name, run in runs.items()}, ratio, facts, arguments.json)


def ratio_of(work: str) -> tuple[str, str]:
    """The two runs whose seconds are compared: (numerator, denominator)."""
    return ("tailed/partial", "tailed/async") if work == "tailed" else ("balanced/async", "balanced/sync")


def balanced_work(arguments: argparse.Namespace) -> list[str]:
    """Every answer has the same length."""
    return [*shared(arguments, arguments.tokens), "rollout.ignore_eos=true"]


def tailed_work(arguments: argparse.Namespace) -> list[str]:
    """An answer ends when the random model happens to say its end of sequence, about once in 300 tokens."""
    return [*shared(arguments, arguments.longest), "rollout.ignore_eos=false", "actor.adam.lr=1e-7"]


def shared(arguments: argparse.Namespace, tokens: int) -> list[str]:
    """What all runs have in common."""
    return [
        f"rollout.batch_size={arguments.prompts}",
        f"rollout.n_samples_per_prompt={arguments.samples}",
        f"rollout.max_new_tokens={tokens}",
        f"data.max_len={tokens + 96}",
        f"data.prompt_dataset=configs/tasks/digits.py:prompts?count={arguments.prompts * 6}",
        f"train.num_episodes={arguments.iterations}",
        f"train.max_iterations={arguments.iterations}",
        "eval.dataset=[]",
        "ckpt.save_steps=-1",
        "ckpt.save_hf=false",
        f"vllm.max_num_seqs={arguments.prompts * arguments.samples * 3 // 2}",
        "vllm.cpu_kv_cache_gib=2",
        "run.cpu_threads=1",
    ]


def slots(arguments: argparse.Namespace, prompts: int | None = None) -> int:
    """Samples that may be in flight."""
    return int((prompts or arguments.prompts) * arguments.samples)


async def measured_run(root: str, overrides: Sequence[str], flying: int) -> Measured:
    """A whole run of its own."""
    from flows.train import train
    from rlhf_core.storage import RunStore

    run_id = f"benchmark-{time.time_ns()}"
    await train("configs/grpo_tiny_cpu.yaml", [*overrides, f"storage.root={root}"], run_id, "never")
    return measure(RunStore(run_id, root), flying)


def measure(store: RunStore, flying: int) -> Measured:
    """The figures of a finished run, from its log."""
    iterations = store.completed_iterations()
    rollouts, experience, updates = (
        [found[0] for k in iterations if (found := store.stage(k, stage)) is not None]
        for stage in (Stage.ROLLOUT, Stage.EXPERIENCE, Stage.UPDATE)
    )
    ends = [ended(manifest.body) for manifest in updates]
    begin, end = ends[WARM_UP - 1], ends[-1]
    in_flight, tokens = 0.0, 0
    for k, manifest in enumerate(rollouts):
        for row in store.read_trajectories(manifest.parts):
            in_flight += max(0.0, min(row.started_at + row.seconds, end) - max(row.started_at, begin))
            if k >= WARM_UP and (manifest.selected is None or row.group_id in manifest.selected):
                tokens += row.num_actions
    return Measured(
        iteration_seconds=[later - earlier for earlier, later in pairwise(ends[WARM_UP - 1 :])],
        rollout_seconds=statistics.median(manifest.body["seconds"] for manifest in rollouts[WARM_UP:]),
        training_seconds=statistics.median(
            log_probs.body["seconds"] + update.body["seconds"]
            for log_probs, update in zip(experience[WARM_UP:], updates[WARM_UP:], strict=True)
        ),
        tokens_per_second=tokens / (end - begin),
        idle_share=1 - in_flight / (flying * (end - begin)),
        lag_mean=statistics.mean(
            manifest.body["metrics"]["rollout/staleness_mean"] for manifest in experience[WARM_UP:]
        ),
        lag_max=max(manifest.body["metrics"]["rollout/staleness_max"] for manifest in experience[WARM_UP:]),
    )


def ended(body: dict[str, Any]) -> float:
    """Unix seconds."""
    return float(body["started_at"]) + float(body["seconds"])


if __name__ == "__main__":
    main()
