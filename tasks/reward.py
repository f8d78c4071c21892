"""Trajectories to rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.records import Stage
from rlhf_core.telemetry import Stopwatch
from tasks.filling import norm_state_before, rewards_of
from tasks.options import TASK_OPTIONS
from tasks.replay import given_rewards
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small
from tasks.watch import at_stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Part, StageManifest


@task(name="reward", task_run_name="reward {iteration}", **TASK_OPTIONS)
@at_stage("reward")
async def reward(run_id: str, iteration: int) -> dict[str, Any]:
    """Score every sample of the iteration."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.REWARD):
        return small(done[1])
    watch = Stopwatch()
    played, rollout = await required(run, iteration, Stage.ROLLOUT)
    parts, found = await _rewards(run, played)
    return small(await commit(run, iteration, Stage.REWARD, parts, [rollout], {**watch.stamp(), **found}))


async def _rewards(run: OpenRun, played: StageManifest) -> tuple[Sequence[Part], dict[str, Any]]:
    """The shards, and what the manifest says."""
    iteration, session, replay = played.iteration, run.session, run.replay
    if replay is not None and not replay.filters_anew:
        if not run.config.scores:
            return await given_rewards(run, replay, iteration)
    elif played.selected is not None:
        return await rewards_of(run, played)  # scored while the batch was filled
    state = await norm_state_before(run, iteration)
    scored = await session.with_scoring(lambda: session.score(iteration, played.parts, state, played.selected))
    return scored.parts, {"metrics": scored.metrics, "failures": scored.failures, "norm_state": scored.norm_state}
