"""The runs that ``benchmarks.peers`` compares: ours, with the processes that a user's run has, and TRL's beside them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from prefect import flow

from benchmarks.process_time import ProcessTimes
from benchmarks.trl_loop import Job
from flows.identity import run_child
from flows.iteration import iteration_flow
from flows.train import train
from rlhf_core.config import Config, load_config
from rlhf_core.data import load_tokenizer, models_of, pin_models, resolve_model, training_prompts
from rlhf_core.generation.settings import DTYPES
from rlhf_core.records import PromptCursor, Stage
from rlhf_core.storage import RunStore
from tasks.lineage import iteration_metrics
from tasks.opening import model_cache
from tasks.run import opened

POLL_SECONDS = 0.05  # how late the end of an asynchronous iteration may be seen, of the seconds of all that count


@dataclass(frozen=True)
class Work:
    """What both sides are to do."""

    config: str
    keys: list[str]  # on top
    reward: str
    warm_up: int  # iterations that do not count
    iterations: int  # that do
    threads: int
    queue_size: int  # of the asynchronous run
    folder: Path

    @property
    def count(self) -> int:
        return self.warm_up + self.iterations


@dataclass(frozen=True)
class Timed:
    """Seconds of one iteration of one side."""

    total: float
    generate: float
    update: float
    other: float
    cpu: float
    cpu_of: dict[str, float]  # by process (ours), by part (TRL)
    reward: float  # mean

    @classmethod
    def ours(cls, store: RunStore, iteration: int, total: float, cpu_of: dict[str, float]) -> Timed:
        metrics = iteration_metrics(store, iteration)
        generate = metrics["seconds/rollout"]
        update = metrics["seconds/experience"] + metrics["seconds/update"]
        other = total - generate - update
        return cls(total, generate, update, other, sum(cpu_of.values()), cpu_of, metrics["reward/mean"])

    @classmethod
    def trl(cls, times: dict[str, Any]) -> Timed:
        wall, cpu = times["wall"], times["cpu"]
        cpu_of = {"generate": cpu["generate"], "update": cpu["total"] - cpu["generate"]}
        update = wall["total"] - wall["generate"]
        return cls(wall["total"], wall["generate"], update, 0.0, cpu["total"], cpu_of, times["reward"])


async def synchronous(work: Work) -> dict[str, list[Timed]]:
    """One iteration each in turn."""
    last = f"train.max_iterations={work.count + 1}"  # writes the final checkpoint, and is not run
    config = load_config(work.config, [*work.keys, last])
    sides: dict[str, list[Timed]] = {"ours": [], "TRL": []}

    @flow(name="benchmark-peers", persist_result=False)
    async def alternate() -> None:
        async with opened(config, f"peers-sync-{os.getpid()}", "never") as run:
            with TrlProcess(make_job(config, work)) as trl:
                for iteration in range(work.count):
                    clock, start = ProcessTimes(), perf_counter()
                    parameters = {"run_id": run.run_id, "iteration": iteration, "storage_root": run.store.root}
                    key, title = f"{run.run_id}/{iteration:08d}", f"{run.run_id} {iteration}"
                    await run_child(iteration_flow, "iteration", key, title, parameters)
                    seconds = perf_counter() - start
                    sides["ours"].append(Timed.ours(run.store, iteration, seconds, clock.lap()))
                    sides["TRL"].append(Timed.trl(await asyncio.to_thread(trl.iterate)))
                    shown = ", ".join(f"{side} {timed[-1].total:.2f} s" for side, timed in sides.items())
                    print(f"  iteration {iteration}: {shown}", flush=True)

    await alternate()
    return {side: timed[work.warm_up :] for side, timed in sides.items()}


async def asynchronous(work: Work) -> dict[str, list[Timed]]:
    """A whole run, with half of TRL's iterations before it and half behind: machines change their speed.

    An iteration of ours lasts from the end of one update to the end of the next.
    """
    keys = [
        *work.keys,
        "train.async_enable=true",
        f"train.async_queue_size={work.queue_size}",
        f"run.cpu_threads={max(1, work.threads // 2)}",  # engine and rank compute at the same time
    ]
    config = load_config(work.config, keys)
    store = RunStore(f"peers-async-{os.getpid()}", str(work.folder))
    with TrlProcess(make_job(config, work)) as trl:
        before = work.warm_up + work.iterations // 2
        theirs = [Timed.trl(await asyncio.to_thread(trl.iterate)) for _ in range(before)]
        watching = asyncio.create_task(_watch(store, work))
        try:
            await train(work.config, keys, store.run_id, "never")
            seconds, cpu_of = await watching
        finally:
            watching.cancel()
        theirs += [Timed.trl(await asyncio.to_thread(trl.iterate)) for _ in range(before, work.count)]
    cpu_of = {role: spent / work.iterations for role, spent in cpu_of.items()}
    counted = range(work.warm_up, work.count)
    ours = [Timed.ours(store, iteration, seconds / work.iterations, cpu_of) for iteration in counted]
    return {"ours": ours, "TRL": theirs[work.warm_up :]}


async def _watch(store: RunStore, work: Work) -> tuple[float, dict[str, float]]:
    """Seconds of all iterations that count, and of the processor by process."""
    await _update_of(store, work.warm_up - 1)
    clock, start = ProcessTimes(), perf_counter()
    await _update_of(store, work.count - 1)
    return perf_counter() - start, clock.lap()


async def _update_of(store: RunStore, iteration: int) -> None:
    """Return once it is in the log."""
    while await asyncio.to_thread(store.stage, iteration, Stage.UPDATE) is None:  # noqa: ASYNC110  the log is files
        await asyncio.sleep(POLL_SECONDS)


def make_job(config: Config, work: Work) -> Job:
    """The same work in TRL's words."""
    pinned = pin_models(models_of(config), config.storage)["policy"]
    model = resolve_model(pinned, model_cache())
    prompts = training_prompts(config, load_tokenizer(model))
    order, cursor, rows = prompts.order(config.train.seed), PromptCursor(), []
    for _ in range(work.count):
        drawn, cursor = order.draw(cursor, config.rollout.batch_size)
        for prompt in (prompts[index] for index in drawn):
            rows.append({"prompt": prompt.text, "label": prompt.label, "tokens": list(prompt.token_ids)})
    adam = config.actor.adam
    return Job(
        model=model,
        dtype=DTYPES[config.ds.param_dtype],
        attention=config.ds.attn_implementation,
        reward=work.reward,
        rows=rows,
        prompts=config.rollout.batch_size,
        samples=config.rollout.n_samples_per_prompt,
        tokens=config.rollout.max_new_tokens,
        micro_batch=config.train.micro_batch_size,
        temperature=config.rollout.temperature,
        lr=adam.lr,
        betas=adam.betas,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_norm=config.actor.max_norm,
        seed=config.train.seed,
        threads=work.threads,
        folder=str(work.folder / "trl"),
    )


class TrlProcess:
    """TRL, waiting for its turn."""

    def __init__(self, job: Job) -> None:
        path = Path(job.folder).with_suffix(".json")
        path.write_text(json.dumps(asdict(job)))
        command = [sys.executable, "-m", "benchmarks.trl_loop", str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __enter__(self) -> TrlProcess:
        print(f"  TRL {self._line()['ready']}", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def iterate(self) -> dict[str, Any]:
        """One iteration: ``trl_loop.Times``."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"TRL ended with exit status {self._process.wait()}: its last words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer
