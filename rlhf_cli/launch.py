"""Start a run on the stack's worker, follow it by its log, and show what came of it."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from prefect import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    LogFilter,
    LogFilterFlowRunId,
    LogFilterLevel,
)
from prefect.deployments import arun_deployment
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rlhf_cli.configurations import load_for
from rlhf_cli.here import fresh_id
from rlhf_cli.views import curve, printable, samples_table
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore, trajectories
from tasks.lineage import iteration_metrics
from tasks.report import artifact_key
from tasks.resume import KIND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from prefect.client.schemas.objects import FlowRun
    from rich.console import Console

    from rlhf_cli.stack import Stack
    from rlhf_core.config.chain import FlowName

POLL_SECONDS = 1.0
SAMPLES = 2
# What people know the stages as; the manifest of the experience is the advantage task's.
STAGES = {
    Stage.ROLLOUT: "rollout",
    Stage.REWARD: "reward",
    Stage.EXPERIENCE: "advantage",
    Stage.UPDATE: "update",
}


async def launch_and_follow(
    out: Console, stack: Stack, flow: FlowName, config: str, overrides: Sequence[str], run_id: str | None
) -> bool:
    """Run to the end. Returns whether it succeeded."""
    checked = load_for(flow, config, overrides)
    run_id = run_id or fresh_id(config)
    store = RunStore(run_id, checked.storage.root, dict(checked.storage.options), checked.storage.timeout)
    flow_run = await arun_deployment(
        f"rlhf/{flow}",
        parameters={"config": config, "overrides": list(overrides), "run_id": run_id},
        timeout=0,
        as_subflow=False,
        flow_run_name=run_id,
    )
    url = f"{stack.prefect_url}/runs/flow-run/{flow_run.id}"
    out.print(f"run {run_id}: {url}", soft_wrap=True)
    ended = await _follow(out, store, flow_run.id)
    if ended.state is None or not ended.state.is_completed():
        out.print(f"the run ended as {ended.state_name}: {ended.state.message if ended.state else ''}", markup=False)
        await _print_errors(out, flow_run.id)
        out.print("its log is kept: the same command with the same --run-id goes on where it stopped")
        return False
    await asyncio.to_thread(_summary, out, store, flow, url, await _tracker_url(run_id))
    return True


async def _follow(out: Console, store: RunStore, flow_run_id: UUID) -> FlowRun:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    position = Position(store)
    async with get_client() as client:
        with Progress(*columns, console=out) as progress:
            bar = progress.add_task("waiting for its turn", total=None, numbers="")
            while True:
                flow_run = await client.read_flow_run(flow_run_id)
                seen = await asyncio.to_thread(position.look)
                if seen is not None:
                    progress.update(bar, **seen)
                elif flow_run.state is not None and flow_run.state.is_running():
                    progress.update(bar, description="starting engines")
                if flow_run.state is not None and flow_run.state.is_final():
                    return flow_run
                await asyncio.sleep(POLL_SECONDS)


class Position:
    """Where the run is, by its log. Looks only at the iteration it has come to: a long run is no slower to follow."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._total: int | None = None
        self._by_rewards = True
        self._done = 0
        self._numbers = ""

    def look(self) -> dict[str, Any] | None:
        """Fields of the progress bar; None before the run has a log."""
        if self._total is None:
            body = self._store.read_run()
            if body is None:
                return None
            self._total = int(body["plan"]["iterations"])
            self._by_rewards = body.get("kind", KIND) == KIND
        while self._done < self._total and self._store.stage(self._done, Stage.UPDATE) is not None:
            metrics = iteration_metrics(self._store, self._done)
            self._numbers = _numbers(metrics) or self._numbers
            self._done += 1
        stage = "done"
        if self._done < self._total and not self._by_rewards:
            stage = "training"
        elif self._done < self._total:
            stage = next(
                name for s, name in STAGES.items() if self._store.stage(self._done, s) is None or s is Stage.UPDATE
            )
        return {
            "completed": self._done,
            "total": self._total,
            "description": f"{stage:<9}",
            "numbers": self._numbers,
        }


def _numbers(metrics: dict[str, float]) -> str:
    """An iteration at a glance; one that only trained what was left over sampled nothing."""
    shown = {
        "reward/mean": "reward {:.3f}",
        "rollout/tokens_per_second": "{:.0f} tok/s",
        "train/loss": "loss {:.3f}",
        "train/accuracy": "accuracy {:.3f}",
    }
    return "  ".join(form.format(metrics[name]) for name, form in shown.items() if name in metrics)


def _summary(out: Console, store: RunStore, flow: FlowName, url: str, tracker_url: str | None) -> None:
    metrics = [iteration_metrics(store, iteration) for iteration in store.completed_iterations()]
    if flow == "train":
        _summary_of_rewards(out, store, metrics)
    else:
        _summary_of_training(out, store, metrics)
    out.print(f"Prefect       {url}", soft_wrap=True)
    out.print(f"MLflow        {tracker_url or 'no tracker'}", soft_wrap=True)
    if flow == "train":
        out.print(f"trajectories  {store.url_of('iterations')}   (rlhf trajectories {store.url})", soft_wrap=True)
    out.print(f"checkpoints   {store.url_of('checkpoints')}", soft_wrap=True)


def _summary_of_training(out: Console, store: RunStore, metrics: Sequence[Mapping[str, float]]) -> None:
    losses = [of_iteration["train/loss"] for of_iteration in metrics if "train/loss" in of_iteration]
    out.print("\nloss")
    for line in curve(losses):
        out.print(line, markup=False)
    out.print()
    _held_out(out, store, len(metrics), ("eval/loss", "eval/accuracy"))


def _summary_of_rewards(out: Console, store: RunStore, metrics: Sequence[Mapping[str, float]]) -> None:
    rewards = [of_iteration["reward/mean"] for of_iteration in metrics if "reward/mean" in of_iteration]
    out.print("\nmean reward")
    for line in curve(rewards):
        out.print(line, markup=False)
    best = max(range(len(rewards)), key=rewards.__getitem__)
    out.print(
        f"\nreward {rewards[0]:.3f} → {rewards[-1]:.3f} in {len(rewards)} iterations (best {rewards[best]:.3f} in {best})"
    )
    last = len(metrics)
    _held_out(out, store, last, ("eval/reward_mean", "eval/pass@1"))
    out.print(samples_table("before", _samples(store, store.read_evaluation(0), 0)))
    out.print(samples_table("after", _samples(store, store.read_evaluation(last), last - 1)))


def _held_out(out: Console, store: RunStore, last: int, names: Sequence[str]) -> None:
    """The first and the last evaluation, where there are both."""
    first_eval, last_eval = store.read_evaluation(0), store.read_evaluation(last)
    if first_eval and last_eval:
        for name in names:
            if name in first_eval["metrics"] and name in last_eval["metrics"]:
                out.print(f"held out: {name} {first_eval['metrics'][name]:.3f} → {last_eval['metrics'][name]:.3f}")


def _samples(store: RunStore, evaluation: dict[str, Any] | None, iteration: int) -> list[dict[str, Any]]:
    """A few answers: to held-out prompts where there are some, else of an iteration."""
    if evaluation is not None:
        return list(evaluation["samples"][:SAMPLES])
    found: list[dict[str, Any]] = trajectories(store, iteration, limit=SAMPLES).to_pylist()
    return found


async def _tracker_url(run_id: str) -> str | None:
    """The tracker's page, from the link artifact of the run."""
    key = ArtifactFilter(key=ArtifactFilterKey(any_=[artifact_key(run_id, "mlflow")]))
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=key, limit=1)
    match = re.search(r"\((http[^)]+)\)", str(found[0].data)) if found else None
    return match[1] if match else None


async def _print_errors(out: Console, flow_run_id: UUID) -> None:
    async with get_client() as client:
        logs = await client.read_logs(
            LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]), level=LogFilterLevel(ge_=40)), limit=20
        )
    for log in logs:
        out.print(printable(log.message)[:2000], style="red", markup=False)
