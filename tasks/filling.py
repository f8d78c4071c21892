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
from rlhf_core.records import KeptGroup, OpenGroup, Part, PromptCursor, Round, Stage
from rlhf_core.rewards.normalise import normalisation_metrics
from tasks.replay import replayed_round, source_rounds
from tasks.stages import required, to_the_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.records import StageManifest
    from rlhf_core.storage import RewardRow
    from tasks.run import OpenRun


async def fill(run: OpenRun, iteration: int, cursor: PromptCursor) -> Filling:
    """The batch of an iteration, with as many rounds as it needs.

    Raises:
        RunFailedError: it cannot be filled, see ``Filling.check``.
    """
    kept, unfinished = await left_over(run, iteration)
    most = None
    if run.replay is not None:
        most, cursor = await source_rounds(run.replay, iteration)
    filling = Filling(run.config, iteration, kept, cursor, most_rounds=most, carried_unfinished=unfinished)
    for recorded in await asyncio.to_thread(run.store.rounds, iteration):
        filling = filling.with_round(recorded)
    while filling.needs_round:
        filling = filling.with_round(await play_round(run, filling))
    filling.check()
    return filling


async def left_over(run: OpenRun, iteration: int) -> tuple[tuple[KeptGroup, ...], tuple[OpenGroup, ...]]:
    """The groups that earlier iterations kept and did not train, and those that they did not finish."""
    if iteration == 0:
        return (), ()
    manifest, _ = await required(run, iteration - 1, Stage.ROLLOUT)
    unfinished = manifest.body.get("unfinished", ())  # a log of old has none
    return (
        tuple(KeptGroup(**group) for group in manifest.body["buffered"]),
        tuple(OpenGroup(**group) for group in unfinished),
    )


async def play_round(run: OpenRun, filling: Filling) -> Round:
    """Sample, score and judge the next round, and record it; a replay takes the samples, and the scores if it keeps them."""
    iteration, session = filling.iteration, run.session
    if run.replay is not None:
        outcome, scored = await replayed_round(run, run.replay, iteration, len(filling.rounds))
    else:
        draw = filling.next_draw
        outcome = await session.with_engines(draw.oldest_version, iteration, lambda: session.rollout(draw))
    if run.config.scores:
        state = await norm_state_before(run, iteration, filling.rounds)
        groups = None if run.replay is None else set(outcome.places)  # their shards may hold others too
        scored = await session.with_scoring(lambda: session.score(iteration, outcome.parts, state, groups))
    session.check_lease()
    played = replace(filling.judged(outcome, scored), user_code=run.user_code)
    return await to_the_end(asyncio.to_thread(run.store.record_round, played))


async def parts_of(run: OpenRun, filling: Filling) -> list[Part]:
    """The shards that hold the batch's groups, of this iteration and of earlier ones."""
    parts: list[Part] = []
    for played in await rounds_of(run, filling.selected):
        # Not all of the batch that it has: of a group that was sampled again since, it has what is too old.
        here = (played.iteration, played.number)
        parts += played.parts_of({g.group_id for g in filling.selected if (g.iteration, g.round) == here})
    return parts


async def rewards_of(run: OpenRun, played: StageManifest) -> tuple[list[Part], dict[str, Any]]:
    """The reward shards of a filled batch, and what its reward manifest says.

    Metrics are of the batch's samples; failures of all that this iteration's rounds scored.
    """
    rounds = await asyncio.to_thread(run.store.rounds, played.iteration)
    parts, of_batch = await _rewards_of_batch(run, played)
    seconds = sum(source.scored["metrics"]["reward/seconds"] for source in rounds)
    failures: Counter[str] = Counter()
    for source in rounds:
        failures.update(source.scored["failures"])
    state = await norm_state_before(run, played.iteration, rounds)
    metrics = {**reward_metrics(of_batch, seconds), **normalisation_metrics(state)} if of_batch else {}
    return parts, {"metrics": metrics, "failures": dict(failures), "norm_state": state}


async def _rewards_of_batch(run: OpenRun, played: StageManifest) -> tuple[list[Part], list[RewardRow]]:
    """The shards with the rewards of a batch, and its rows.

    They are those of the rounds that hold its groups, where no other of these rounds holds one of the groups too, sampled
    before it became too old: then the batch's rewards get a shard of their own, so that no reader finds a sample twice.
    """
    held_by = {group["group_id"]: (group["iteration"], group["round"]) for group in played.body["selected"]}
    parts: list[Part] = []
    of_batch: list[RewardRow] = []
    of_others = 0
    for source in await rounds_of(run, [KeptGroup(**group) for group in played.body["selected"]]):
        parts += source.reward_parts
        rows = await asyncio.to_thread(run.store.read_rewards, source.reward_parts)
        rows = [row for row in rows if row.group_id in held_by]
        newest = [row for row in rows if held_by[row.group_id] == (source.iteration, source.number)]
        of_batch += newest
        of_others += len(rows) - len(newest)
    if of_others:
        run.session.check_lease()
        parts = [await asyncio.to_thread(run.store.publish_rewards, played.iteration, of_batch)]
    return parts, of_batch


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
