"""Prompts to trajectories."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.records import Draw, PromptCursor, Stage
from rlhf_core.telemetry import Stopwatch
from tasks.filling import fill, parts_of
from tasks.options import TASK_OPTIONS
from tasks.replay import sampled_batch
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small
from tasks.watch import at_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Part


@task(name="rollout", task_run_name="rollout {iteration}", **TASK_OPTIONS)
@at_stage("rollout")
async def rollout(run_id: str, iteration: int) -> dict[str, Any]:
    """Sample the iteration's batch with policy version ``iteration``."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.ROLLOUT):
        return small(done[1])
    watch = Stopwatch()
    parts, body = await _batch(run, iteration)
    return small(await commit(run, iteration, Stage.ROLLOUT, parts, [], {**watch.stamp(), **body}))


async def _batch(run: OpenRun, iteration: int) -> tuple[Sequence[Part], dict[str, Any]]:
    """The shards, and what the manifest says."""
    if run.replay is None:
        return await (in_rounds if run.config.fills_batches else at_once)(run, iteration)
    parts, body = await (
        in_rounds(run, iteration) if run.replay.filters_anew else sampled_batch(run, run.replay, iteration)
    )
    if run.replay.other_model and iteration == 0:
        await run.session.with_scoring(lambda: run.session.check_tokens(parts))
    return parts, body


async def at_once(run: OpenRun, iteration: int) -> tuple[Sequence[Part], dict[str, Any]]:
    """Every prompt that is drawn is in the batch."""
    cursor = await cursor_before(run, iteration)
    oldest = iteration - run.config.rollout_lag
    draw = Draw(iteration, oldest, cursor, run.config.rollout.batch_size)
    outcome = await run.session.with_engines(oldest, iteration, lambda: run.session.rollout(draw))
    return outcome.parts, {
        "cursor_in": asdict(cursor),
        "cursor_out": asdict(outcome.cursor),
        "drawn": outcome.drawn,
        "resumed_groups": outcome.resumed_groups,
        "metrics": outcome.tally.metrics(),
    }


async def in_rounds(run: OpenRun, iteration: int) -> tuple[Sequence[Part], dict[str, Any]]:
    """Groups are filtered or sampled ahead: rounds, scored at once, until the batch is full."""
    filling = await fill(run, iteration, await cursor_before(run, iteration))
    return await parts_of(run, filling), filling.body()


async def cursor_before(run: OpenRun, iteration: int) -> PromptCursor:
    """Where the iteration's draw begins: where the one before ended."""
    if iteration == 0:
        return PromptCursor()
    manifest, _ = await required(run, iteration - 1, Stage.ROLLOUT)
    return PromptCursor(**manifest.body["cursor_out"])
