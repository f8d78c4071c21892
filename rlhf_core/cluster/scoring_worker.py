"""The process that scores answers and turns rewards into advantages.

::

    trajectory shards ──▶ reward source ──▶ reward shards
    trajectories ⋈ rewards ⋈ log-probs of the training ranks ──▶ advantages ──▶ experience shards
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlhf_core.cluster.measures import evaluation_metrics, readable, reward_metrics
from rlhf_core.cluster.selection import ledger, trainable, with_rewards
from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import RewardRequest, RewardResult, RewardStatus, Trajectory
from rlhf_core.rewards import RewardSource, check_reward_config, make_reward_source
from rlhf_core.storage import RewardRow
from rlhf_core.telemetry import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.experience import Logprobs
    from rlhf_core.records import Part, StageRef


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reward stage left behind."""

    parts: tuple[Part, ...]
    metrics: dict[str, float]
    failures: dict[str, int]  # reason -> samples


@dataclass(frozen=True, slots=True)
class Assembled:
    """What the advantage stage left behind."""

    parts: tuple[Part, ...]
    ledger: dict[str, int]
    metrics: dict[str, float]


class ScoringWorker:
    """Async Ray actor."""

    def __init__(self, context: WorkerContext) -> None:
        context.enter("scoring")
        self._context = context
        self._config = context.config
        self._store = context.store
        self._source: RewardSource | None = None

    async def start(self) -> None:
        """Start the reward source; a reward function that cannot be loaded is an error here, not in iteration 0."""
        if self._source is None:
            await asyncio.to_thread(check_reward_config, self._config.reward)
            self._source = make_reward_source(self._config.reward)

    async def ping(self) -> None:
        """Answer."""

    async def score(self, iteration: int, rollout: StageRef) -> Scored:
        """Score every sample of a rollout."""
        watch = Stopwatch()
        rows = await asyncio.to_thread(self._trajectories, rollout)
        scored = await self._score(rows)
        part = await asyncio.to_thread(self._store.publish_rewards, iteration, scored)
        failures = Counter(row.result.error or row.result.status for row in scored if row.result.reward is None)
        unscored = [row for row in scored if row.result.status not in (RewardStatus.OK, RewardStatus.SKIPPED)]
        if unscored and self._config.reward.on_error == "fail":
            reason = unscored[0].result.error or unscored[0].result.status
            raise RunFailedError(
                f"iteration {iteration}: {len(unscored)} samples without a reward (reward.on_error=fail), such as: {reason}"
            )
        return Scored((part,), reward_metrics(scored, watch.seconds), dict(failures))

    async def assemble(
        self,
        iteration: int,
        rollout: StageRef,
        reward: StageRef,
        drawn: int,
        kl_coef: float,
        policy: Sequence[Any],
        reference: Sequence[Any],
    ) -> Assembled:
        """Advantages for every trained row.

        Args:
            iteration: its number.
            rollout: the trajectories.
            reward: their rewards.
            drawn: prompts drawn in this iteration, for the ledger.
            kl_coef: weight of the KL penalty.
            policy: object references to each rank's log-probs under the policy.
            reference: the same under the reference model; empty without one.

        Raises:
            RunFailedError: no sample is left to train on.
        """
        from rlhf_core.cluster.experience import make_experience  # torch, which the controller must not load

        watch = Stopwatch()
        rows = await asyncio.to_thread(self._joined, rollout, reward)
        chosen = trainable(rows, self._config.rollout.on_error)
        if not chosen:
            reasons = Counter(row.error or f"reward {row.reward_status}" for row in rows)
            raise RunFailedError(f"iteration {iteration}: no sample is left to train on: {reasons.most_common(3)}")
        old = await _merged(policy)
        ref = await _merged(reference) if reference else None
        finite = [row for row in chosen if _finite(old[row.key]) and (ref is None or _finite(ref[row.key]))]
        if not finite:
            raise RunFailedError(f"iteration {iteration}: no row has finite log-probs: the policy's weights are broken")
        broken, chosen = len(chosen) - len(finite), finite
        experience, metrics = make_experience(chosen, old, ref, kl_coef, self._config)
        part = await asyncio.to_thread(self._store.publish_experience, iteration, experience)
        account = ledger(drawn, chosen)
        if not account.balanced:
            raise RunFailedError(f"iteration {iteration}: prompts are lost or counted twice: {account}")
        return Assembled(
            (part,),
            asdict(account),
            {**metrics, "advantage/not_finite": float(broken), "advantage/seconds": watch.seconds},
        )

    async def judge(self, parts: Sequence[Part], sample_rows: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Score an evaluation: its metrics, and its first rows for people."""
        rows = await asyncio.to_thread(self._store.read_trajectories, parts)
        scored = {(row.group_id, row.sample_index): row.result for row in await self._score(rows)}
        judged = with_rewards(rows, scored)
        return evaluation_metrics(judged, self._config), [readable(row) for row in judged[:sample_rows]]

    async def samples(self, rollout: StageRef, reward: StageRef, count: int) -> list[dict[str, Any]]:
        """Readable rows for people: the best and the worst first, then others."""
        rows = await asyncio.to_thread(self._joined, rollout, reward)
        ranked = sorted(rows, key=lambda row: (row.reward is None, -(row.reward or 0.0)))
        half = (count + 1) // 2
        picked = ranked if len(ranked) <= count else [*ranked[:half], *ranked[-(count - half) :]]
        return [readable(row) for row in picked]

    async def shutdown(self) -> None:
        """End the reward processes."""
        if self._source is not None:
            await self._source.close()
            self._source = None

    async def _score(self, rows: Sequence[Trajectory]) -> list[RewardRow]:
        """One reward an episode: the executor's own where it gave one, else the source's."""
        episodes = {(row.group_id, row.sample_index): row for row in sorted(rows, key=lambda row: row.key)}
        asked = [row for row in episodes.values() if not row.failed and row.reward is None]
        assert self._source is not None, "start() comes first"
        answers = await self._source.score([_request(row) for row in asked])
        results = {(row.group_id, row.sample_index): answer for row, answer in zip(asked, answers, strict=True)}
        for key, row in episodes.items():
            if row.failed:
                results[key] = RewardResult(status=RewardStatus.SKIPPED, error=row.error)
            elif row.reward is not None:
                score = row.reward if row.score is None else row.score
                results[key] = RewardResult(status=RewardStatus.OK, reward=row.reward, score=score)
        return [RewardRow(group, sample, results[group, sample]) for group, sample in episodes]

    def _trajectories(self, rollout: StageRef) -> list[Trajectory]:
        return self._store.read_trajectories(self._store.read_manifest(rollout).parts)

    def _joined(self, rollout: StageRef, reward: StageRef) -> list[Trajectory]:
        scored = self._store.read_rewards(self._store.read_manifest(reward).parts)
        return with_rewards(
            self._trajectories(rollout), {(row.group_id, row.sample_index): row.result for row in scored}
        )


async def _merged(references: Sequence[Any]) -> Logprobs:
    """The shares of all ranks."""
    try:
        shares = await asyncio.to_thread(ray.get, list(references))
    except PROCESS_GONE as error:
        raise WorkerError(f"a training rank died while it computed log-probs: {error}") from error
    return {key: values for share in shares for key, values in share.items()}


def _finite(values: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(values).all())


def _request(row: Trajectory) -> RewardRequest:
    return RewardRequest(
        query=row.prompt + row.answer,
        prompt=row.prompt,
        answer=row.answer,
        label=row.label,
        group_id=row.group_id,
        sample_index=row.sample_index,
        datasource=row.datasource,
    )
