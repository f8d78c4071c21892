"""Another reward source over the saved trajectories of a run: no engine, no training, a part at a time.

::

    iteration 0 ─ part ─▶ answers ─▶ reward source ─▶ rewards, durable       (storage.rescored)
                ─ part ─▶ …                             └ all parts? the iteration's manifest
    iteration 1 ─ …

What is complete is not scored again. A sample that fails to be scored is recorded with its status and reason, as in a run; but
an iteration of which *no* sample can be scored stops the work, and leaves nothing of it: the function is broken or the server
is gone, and the next start goes on there.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from rlhf_core.errors import RewardError
from rlhf_core.records import RewardResult, RewardStatus, Stage, episodes_of
from rlhf_core.rewards.request import reward_request
from rlhf_core.storage import RewardRow
from rlhf_core.storage.rescored import RescoredPart
from rlhf_core.telemetry import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import Part, Trajectory
    from rlhf_core.rewards.source import RewardSource
    from rlhf_core.storage.rescored import Rescoring


async def rescore_iteration(rescoring: Rescoring, iteration: int, source: RewardSource) -> int:
    """Score what is missing of an iteration whose rollout is complete. Returns the samples that were scored now.

    Raises:
        RewardError: not one of its samples could be scored.
        CorruptShardError: a shard is missing or damaged.
    """
    watch = Stopwatch()
    store = rescoring.store
    if await asyncio.to_thread(rescoring.manifest, iteration) is not None:
        return 0
    rollout = await asyncio.to_thread(store.stage, iteration, Stage.ROLLOUT)
    assert rollout is not None, "only iterations with a rollout are asked for"
    done: list[RescoredPart] = []
    held: list[tuple[Part, list[RewardRow]]] = []  # without any reward, until another part shows that the source works
    scored_now, counts = 0, Counter[str]()
    for part in rollout[0].parts:
        found = await asyncio.to_thread(rescoring.published, iteration, part)
        if found is not None:
            rows = await asyncio.to_thread(store.read_rewards, [found])
            done.append(RescoredPart(part.sha256, found))
        else:
            trajectories = await asyncio.to_thread(store.read_trajectories, [part])
            rows = await _score(trajectories, rollout[0].selected, source)
            scored_now += sum(row.result.status is not RewardStatus.SKIPPED for row in rows)
            if _is_hopeless(rows):
                held.append((part, rows))
            else:
                done.append(
                    RescoredPart(part.sha256, await asyncio.to_thread(rescoring.publish, iteration, part, rows))
                )
        counts.update(row.result.status for row in rows)
    if held and not counts[RewardStatus.OK]:
        raise _hopeless_error(iteration, [row for _, rows in held for row in rows], rescoring)
    for part, rows in held:
        done.append(RescoredPart(part.sha256, await asyncio.to_thread(rescoring.publish, iteration, part, rows)))
    body = {**watch.stamp(), "statuses": {str(status): count for status, count in counts.items()}}
    await asyncio.to_thread(rescoring.commit, iteration, rollout[1], done, body)
    return scored_now


async def _score(
    trajectories: Sequence[Trajectory], selected: frozenset[str] | None, source: RewardSource
) -> list[RewardRow]:
    """One result for each episode of the batch; those that failed are skipped, as in a run."""
    rows = [row for row in trajectories if selected is None or row.group_id in selected]
    episodes = sorted(episodes_of(rows), key=lambda episode: episode.key)
    asked = [episode for episode in episodes if not episode.failed]
    answers = await source.score([reward_request(episode.last) for episode in asked])
    results = {episode.key: answer for episode, answer in zip(asked, answers, strict=True)}
    return [
        RewardRow(
            *episode.key,
            results.get(episode.key, RewardResult(RewardStatus.SKIPPED, error=episode.error)),
        )
        for episode in episodes
    ]


def _is_hopeless(rows: Sequence[RewardRow]) -> bool:
    """True if samples were scored, and none of them got a reward."""
    statuses = {row.result.status for row in rows} - {RewardStatus.SKIPPED}
    return bool(statuses) and RewardStatus.OK not in statuses


def _hopeless_error(iteration: int, rows: Sequence[RewardRow], rescoring: Rescoring) -> RewardError:
    reasons = Counter(
        f"{row.result.status}: {row.result.error}" for row in rows if row.result.status is not RewardStatus.SKIPPED
    )
    shown = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
    return RewardError(
        f"iteration {iteration}: none of its {sum(reasons.values())} samples got a reward ({shown}). What was scored before is "
        f"kept in {rescoring.url}: repair the source and start again, or leave the iteration out with --iterations"
    )
