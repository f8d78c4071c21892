"""A batch that is filled in rounds, each durable: a crash goes on behind the last recorded round.

::

    rollout   left over ─▶ (sample ─▶ score ─▶ judge ─▶ record the round) … ─▶ batch full ─▶ its manifest
    reward    the manifest, the rounds ─▶ rewards of the batch, without scoring again
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.filling import Filling
from rlhf_core.cluster.measures import reward_metrics
from rlhf_core.records import KeptGroup, Part, PromptCursor, Round, Stage
from rlhf_core.rewards.normalise import normalisation_metrics
from tasks.replay import replayed_round, source_rounds
from tasks.stages import required

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.records import StageManifest
    from tasks.run import OpenRun


async def fill(run: OpenRun, iteration: int, cursor: PromptCursor) -> Filling:
    """The batch of an iteration, with as many rounds as it needs.

    Raises:
        RunFailedError: it cannot be filled, see ``Filling.check``.
    """
    left, most = await left_over(run, iteration), None
    if run.replay is not None:
        most, cursor = await source_rounds(run.replay, iteration)
    filling = Filling(run.config, iteration, left, cursor, most_rounds=most)
    for recorded in await asyncio.to_thread(run.store.rounds, iteration):
        filling = filling.with_round(recorded)
    while filling.needs_round:
        filling = filling.with_round(await play_round(run, filling))
    filling.check()
    return filling


async def left_over(run: OpenRun, iteration: int) -> tuple[KeptGroup, ...]:
    """The groups that earlier iterations kept and did not train."""
    if iteration == 0:
        return ()
    manifest, _ = await required(run, iteration - 1, Stage.ROLLOUT)
    return tuple(KeptGroup(**group) for group in manifest.body["buffered"])


async def play_round(run: OpenRun, filling: Filling) -> Round:
    """Sample, score and judge the next round, and record it; a replay takes the samples, and the scores if it keeps them."""
    iteration, session = filling.iteration, run.session
    if run.replay is not None:
        outcome, scored = await replayed_round(run, run.replay, iteration, len(filling.rounds))
    else:
        draw = filling.next_draw
        outcome = await session.heal(iteration, lambda: session.rollout(draw))
    if run.config.scores:
        state = await norm_state_before(run, iteration, filling.rounds)
        scored = await session.heal(iteration, lambda: session.score(iteration, outcome.parts, state))
    session.check_lease()
    played = replace(filling.judged(outcome, scored), user_code=run.user_code)
    return await asyncio.to_thread(run.store.record_round, played)


async def parts_of(run: OpenRun, filling: Filling) -> list[Part]:
    """The shards that hold the batch's groups, of this iteration and of earlier ones."""
    selected = {group.group_id for group in filling.selected}
    return [
        part
        for played in await rounds_of(run, filling.selected)
        for part in played.parts_of(selected & played.places.keys())
    ]


async def rewards_of(run: OpenRun, played: StageManifest) -> tuple[list[Part], dict[str, Any]]:
    """The reward shards of a filled batch, and what its reward manifest says.

    Metrics are of the batch's samples; failures of all that this iteration's rounds scored.
    """
    rounds = await asyncio.to_thread(run.store.rounds, played.iteration)
    sources = await rounds_of(run, [KeptGroup(**group) for group in played.body["selected"]])
    parts = [part for source in sources for part in source.reward_parts]
    rows = await asyncio.to_thread(run.store.read_rewards, parts)
    of_batch = [row for row in rows if row.group_id in (played.selected or ())]
    seconds = sum(source.scored["metrics"]["reward/seconds"] for source in rounds)
    failures: Counter[str] = Counter()
    for source in rounds:
        failures.update(source.scored["failures"])
    state = await norm_state_before(run, played.iteration, rounds)
    metrics = {**reward_metrics(of_batch, seconds), **normalisation_metrics(state)} if of_batch else {}
    return parts, {"metrics": metrics, "failures": dict(failures), "norm_state": state}


async def norm_state_before(run: OpenRun, iteration: int, rounds: Sequence[Round] = ()) -> dict[str, Any]:
    """Of the running normalisation, after all that was scored so far: in earlier iterations, and in rounds of this one."""
    if rounds:
        return dict(rounds[-1].scored["norm_state"])
    if iteration == 0:
        return {}
    manifest, _ = await required(run, iteration - 1, Stage.REWARD)
    return dict(manifest.body.get("norm_state", {}))


async def rounds_of(run: OpenRun, groups: Iterable[KeptGroup]) -> list[Round]:
    """The rounds that hold these groups, oldest first."""
    named = sorted({(group.iteration, group.round) for group in groups})
    return [await asyncio.to_thread(run.store.round, iteration, number) for iteration, number in named]
