"""A replay: what another run sampled takes the place of the rollout, and from there on it is a run like any other.

::

    source   rollout ─▶ reward ─▶ …                    source   round 0, 1, … ─▶ …
                │         │                                         │
             adopted   adopted, or scored anew                   adopted, judged by the replay's own filter
                ▼         ▼                                         ▼
    replay   rollout ─▶ reward ─▶ advantage ─▶ …       replay   rollout, filled in rounds ─▶ reward ─▶ …

Which one it is follows from what the replay changes (``config.replay``). Everything is adopted into the replay's own log, so
that it can be read, verified and trained on when its source is gone; its manifests name those of the source.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from rlhf_core.cluster.measures import RolloutTally, tally_rollout
from rlhf_core.cluster.rollout_worker import RolloutOutcome
from rlhf_core.cluster.scoring_worker import Scored
from rlhf_core.cluster.selection import usable_scores, with_rewards
from rlhf_core.records import Part, PromptCursor, Stage
from rlhf_core.storage import adopt_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.cluster.replay import Replay
    from rlhf_core.records import Round, StageRef
    from tasks.run import OpenRun

LEAST_SHARE = 0.1  # below it a batch counts as a tenth of its tokens, and the correction's clamp rules the loss


# --- batches as they were --------------------------------------------------------------------------------------------


async def sampled_batch(run: OpenRun, replay: Replay, iteration: int) -> tuple[Sequence[Part], dict[str, Any]]:
    """The batch that the source trained: its shards, and what the rollout's manifest says."""
    played, ref = await asyncio.to_thread(replay.stage, iteration, Stage.ROLLOUT)
    parts = await asyncio.to_thread(adopt_parts, run.store, replay.source, played.parts, iteration, Stage.ROLLOUT)
    body = played.body
    named = ("carried", "filtered", "failed", "buffered", "unfinished", "selected")
    account: dict[str, Any] = {name: body[name] for name in named if name in body}
    drawn = body["drawn"]
    if iteration == 0:  # to the replay, groups that waited in the source are as if drawn now
        drawn += account.pop("carried", 0)
    return parts, {
        **account,
        "drawn": drawn,
        "cursor_in": body["cursor_in"],
        "cursor_out": body["cursor_out"],
        "source": origin(replay, ref),
        "metrics": untimed(body["metrics"]),
    }


async def given_rewards(run: OpenRun, replay: Replay, iteration: int) -> tuple[Sequence[Part], dict[str, Any]]:
    """The rewards that the source gave to that batch: their shards, and what the reward's manifest says."""
    scored, ref = await asyncio.to_thread(replay.stage, iteration, Stage.REWARD)
    parts = await asyncio.to_thread(adopt_parts, run.store, replay.source, scored.parts, iteration, Stage.REWARD)
    found: dict[str, Any] = {name: scored.body[name] for name in ("failures", "norm_state") if name in scored.body}
    return parts, {**found, "metrics": untimed(scored.body["metrics"]), "source": origin(replay, ref)}


def origin(replay: Replay, ref: StageRef) -> dict[str, Any]:
    """Which manifest of the source it was, as the replay's manifest says."""
    return {"url": replay.source.url_of(ref.path), "iteration": ref.iteration, "manifest_sha256": ref.sha256}


def untimed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Of what the source did, without how fast it was."""
    return {name: value for name, value in metrics.items() if not name.endswith(("/seconds", "/tokens_per_second"))}


def warn_if_far(run: OpenRun, iteration: int, metrics: Mapping[str, float]) -> None:
    """Tell people of a replay what ``far_from`` says, by the stage that has measured it."""
    if run.replay is not None and (warning := far_from(metrics)):
        get_run_logger().warning("iteration %d: %s", iteration, warning)


def far_from(metrics: Mapping[str, float]) -> str | None:
    """What to tell people of a batch that was spoken by a policy too far from the one that is trained; None if it is near."""
    share = metrics.get("mismatch/effective_share", 1.0)
    if share >= LEAST_SHARE:
        return None
    return (
        f"mismatch/effective_share is {share:.3f}: the policy is far from the one that spoke, and what it learns from here on "
        "says little; replay fewer iterations, or change less"
    )


# --- rounds, judged anew ---------------------------------------------------------------------------------------------


async def source_rounds(replay: Replay, iteration: int) -> tuple[int, PromptCursor]:
    """How many rounds the source sampled in an iteration, and where its draw began.

    A batch that was sampled at once is one round, and so is one that a replay took over as it was.
    """
    played, _ = await asyncio.to_thread(replay.stage, iteration, Stage.ROLLOUT)
    return int(played.body.get("rounds", 1)), PromptCursor(**played.body["cursor_in"])


async def replayed_round(run: OpenRun, replay: Replay, iteration: int, number: int) -> tuple[RolloutOutcome, Scored]:
    """What the source sampled in a round, and the rewards that it gave; both as shards of this run.

    A group is drawn in the round that finished it. One that the source sampled again, because it had become too old, is judged
    once, by what was sampled of it first: a replay knows no age, and may have trained it by now.
    """
    played, _ = await asyncio.to_thread(replay.stage, iteration, Stage.ROLLOUT)
    if "rounds" not in played.body:
        return await asyncio.to_thread(_only_round, run, replay, iteration)
    theirs = await asyncio.to_thread(replay.source.round, replay.first + iteration, number)
    judged = await asyncio.to_thread(_judged_before, run, iteration, set(theirs.again))
    return await asyncio.to_thread(_adopted_round, run, replay, iteration, theirs, judged)


def _judged_before(run: OpenRun, iteration: int, groups: set[str]) -> set[str]:
    """Those of the groups that an earlier iteration of this run judged."""
    if not groups:
        return set()
    return {
        group_id
        for earlier in range(iteration)
        for played in run.store.rounds(earlier)
        for group_id in played.verdicts.keys() & groups
    }


def _adopted_round(
    run: OpenRun, replay: Replay, iteration: int, theirs: Round, without: set[str]
) -> tuple[RolloutOutcome, Scored]:
    """The round of the source, without these groups."""
    parts = adopt_parts(run.store, replay.source, theirs.parts, iteration, Stage.ROLLOUT)
    now_at = {old.path: new.path for old, new in zip(theirs.parts, parts, strict=True)}
    places = {group: now_at[path] for group, path in theirs.places.items() if group not in without}
    outcome = RolloutOutcome(
        parts=tuple(parts),
        places=places,
        drawn=len(places),
        cursor=theirs.cursor_out,
        resumed_groups=0,
        tally=RolloutTally(**{**theirs.tally, "seconds": 0.0, "sampled_tokens": 0}),
    )
    rewards = adopt_parts(run.store, replay.source, theirs.reward_parts, iteration, Stage.REWARD)
    metrics = {**theirs.scored["metrics"], "reward/seconds": 0.0}
    scores = {group: of_group for group, of_group in theirs.scored["scores"].items() if group not in without}
    return outcome, Scored(**{**theirs.scored, "parts": tuple(rewards), "metrics": metrics, "scores": scores})


def _only_round(run: OpenRun, replay: Replay, iteration: int) -> tuple[RolloutOutcome, Scored]:
    """The whole batch of the source, as one round."""
    played, _ = replay.stage(iteration, Stage.ROLLOUT)
    scored, _ = replay.stage(iteration, Stage.REWARD)
    parts = adopt_parts(run.store, replay.source, played.parts, iteration, Stage.ROLLOUT)
    rewards = adopt_parts(run.store, replay.source, scored.parts, iteration, Stage.REWARD)
    rows = [(row, part.path) for part in parts for row in run.store.read_trajectories([part])]
    if played.selected is not None:
        rows = [(row, path) for row, path in rows if row.group_id in played.selected]
    batch, places = [row for row, _ in rows], {row.group_id: path for row, path in rows}
    results = {(row.group_id, row.sample_index): row.result for row in run.store.read_rewards(rewards)}
    outcome = RolloutOutcome(
        parts=tuple(parts),
        places=places,
        drawn=len(places),
        cursor=PromptCursor(**played.body["cursor_out"]),
        resumed_groups=0,
        tally=tally_rollout([], 0.0, found=batch),
    )
    return outcome, Scored(
        parts=tuple(rewards),
        metrics={**scored.body["metrics"], "reward/seconds": 0.0},
        failures=dict(scored.body["failures"]),
        scores=usable_scores(with_rewards(batch, results), run.config.rollout.on_error),
        norm_state=dict(scored.body.get("norm_state", {})),
    )
