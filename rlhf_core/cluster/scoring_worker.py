"""The process that scores answers and turns rewards into advantages.

::

    trajectory shards ──▶ reward source ──▶ reward shards
    trajectories ⋈ rewards ⋈ log-probs, values of the training ranks ──▶ advantages ──▶ experience shards
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlhf_core.cluster.measures import (
    datasource_metrics,
    evaluation_metrics,
    outcomes,
    readable,
    reward_metrics,
    source_metrics,
)
from rlhf_core.cluster.reward_worker import model_source
from rlhf_core.cluster.selection import rows_of_batch, trainable, usable_scores, with_rewards
from rlhf_core.cluster.staleness import check_age, newest_only, staleness_metrics
from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.data import load_tokenizer
from rlhf_core.errors import ConfigError, RunFailedError, WorkerError
from rlhf_core.records import RewardResult, RewardStatus, Trajectory, episodes_of
from rlhf_core.rewards import check_reward_config, make_reward_source, reward_request
from rlhf_core.rewards.normalise import normalisation_metrics
from rlhf_core.storage import RewardRow
from rlhf_core.telemetry import Stopwatch, in_stage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.experience import Logprobs
    from rlhf_core.data.tokenizer import Tokenizer
    from rlhf_core.records import Part, StageRef
    from rlhf_core.rewards import WeightedSum
    from rlhf_core.rewards.normalise import NormState

    # role -> object references to what each of its ranks says of its share of the rows: policy, reference, critic
    Answers: TypeAlias = dict[str, list[Any]]


UNREWARDED = RewardResult(
    RewardStatus.ERROR,
    error="the agent gave no reward, and there is no other source: answer rewards in a step, or set reward.functions, "
    "reward.remote_url or reward.model_name_or_path",
)


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reward stage left behind."""

    parts: tuple[Part, ...]
    metrics: dict[str, float]
    failures: dict[str, int]  # reason -> samples
    scores: dict[str, list[float]]  # group -> scores of its usable samples
    norm_state: NormState  # of the running normalisation, {} without one


@dataclass(frozen=True, slots=True)
class Assembled:
    """What the advantage stage left behind."""

    parts: tuple[Part, ...]
    trained: int  # groups
    failed: int  # groups of the batch without a trained sample
    metrics: dict[str, float]


class ScoringWorker:
    """Async Ray actor."""

    def __init__(self, context: WorkerContext) -> None:
        context.enter("scoring")
        self._context = context
        self._config = context.config
        self._store = context.store
        self._source: WeightedSum | None = None

    async def start(self, reward_model: Sequence[Any], max_len: int | None) -> None:
        """Start the reward source; code of the user's that cannot be loaded is an error here, not in iteration 0.

        A replay that keeps its source's rewards has none, and does not look at the code.

        Args:
            reward_model: the ranks of the trained reward model; none without one.
            max_len: the longest row it reads, tokens.
        """
        from rlhf_core.algorithms.check import check_algorithms  # torch, which the controller must not load

        if self._source is not None:
            return
        await asyncio.to_thread(check_algorithms, self._config)
        if self._config.scores and self._config.has_reward_source:
            await asyncio.to_thread(check_reward_config, self._config.reward)
            model = None
            if max_len is not None:
                model = await asyncio.to_thread(model_source, self._context, reward_model, max_len)
            self._source = make_reward_source(self._config.reward, model)

    async def ping(self) -> None:
        """Answer."""

    @in_stage("reward")
    async def score(
        self,
        iteration: int,
        parts: Sequence[Part],
        norm_state: NormState,
        groups: Collection[str] | None = None,
    ) -> Scored:
        """Score every sample of a rollout, or of a round of one.

        Args:
            iteration: its number.
            parts: the trajectories.
            norm_state: of the running normalisation, after all that was scored before.
            groups: only their samples; None: all.
        """
        watch = Stopwatch()
        rows = await asyncio.to_thread(self._store.read_trajectories, parts)
        rows = rows if groups is None else [row for row in rows if row.group_id in groups]
        scored, norm_state = await self._score(rows, norm_state if self._config.reward.normalize_enable else None)
        part = await asyncio.to_thread(self._store.publish_rewards, iteration, scored)
        failures = Counter(row.result.error or row.result.status for row in scored if row.result.reward is None)
        unscored = [row for row in scored if row.result.status not in (RewardStatus.OK, RewardStatus.SKIPPED)]
        if unscored and self._config.reward.on_error == "fail":
            reason = unscored[0].result.error or unscored[0].result.status
            raise RunFailedError(
                f"iteration {iteration}: {len(unscored)} samples without a reward (reward.on_error=fail), such as: {reason}"
            )
        judged = with_rewards(rows, {(row.group_id, row.sample_index): row.result for row in scored})
        scores = usable_scores(judged, self._config.rollout.on_error)
        metrics = {**reward_metrics(scored, watch.seconds), **normalisation_metrics(norm_state)}
        return Scored((part,), metrics, dict(failures), scores, norm_state)

    @in_stage("advantage")
    async def assemble(
        self,
        iteration: int,
        rollout: StageRef,
        reward: StageRef,
        kl_coef: float,
        answers: Answers,
    ) -> Assembled:
        """Advantages for every trained row.

        Args:
            iteration: its number.
            rollout: the trajectories.
            reward: their rewards.
            kl_coef: weight of the KL penalty.
            answers: what the ranks of policy, reference and critic say of the rows; nothing where they were not asked.

        Raises:
            RunFailedError: no sample is left to train on, or one is of a policy version that must not be trained.
        """
        from rlhf_core.cluster.experience import make_experience  # torch, which the controller must not load

        watch = Stopwatch()
        rows = await asyncio.to_thread(rows_of_batch, self._store, rollout, reward)
        if not rows:  # the data ended, and of its last prompts none was kept
            return Assembled((), trained=0, failed=0, metrics={})
        chosen = trainable(rows, self._config.rollout.on_error)
        if not chosen:
            reasons = Counter(episode.error or f"reward {episode.last.reward_status}" for episode in episodes_of(rows))
            raise RunFailedError(f"iteration {iteration}: no sample is left to train on: {reasons.most_common(3)}")
        if not self._config.is_replay:
            check_age(chosen, iteration, self._config.max_age)
        old, ref, values = [
            await _merged(references) if references else None
            for references in (answers["policy"], answers["reference"], answers["critic"])
        ]
        lost = {
            row.key[:2]
            for row in chosen
            if not all(_finite(said[row.key]) for said in (old, ref, values) if said is not None)
        }
        chosen = [row for row in chosen if row.key[:2] not in lost]
        if not chosen:
            raise RunFailedError(
                f"iteration {iteration}: no row has finite log-probs and values: the weights of the policy or the critic "
                "are broken"
            )
        # In a thread: a large batch takes a minute, in which this process would answer no ping.
        experience, metrics = await asyncio.to_thread(make_experience, chosen, old, ref, values, kl_coef, self._config)
        if self._config.train.partial_rollout_mask_old:
            experience, masked = newest_only(experience, chosen)
            metrics |= masked
        part = await asyncio.to_thread(self._store.publish_experience, iteration, experience)
        trained = len({row.group_id for row in chosen})
        return Assembled(
            (part,),
            trained=trained,
            failed=len({row.group_id for row in rows}) - trained,
            metrics={
                **metrics,
                **(source_metrics(chosen) if self._config.is_replay else staleness_metrics(chosen, iteration)),
                **{
                    f"reward/{name}": value
                    for name, value in datasource_metrics(rows, self._config.eval.success_threshold).items()
                },
                "advantage/not_finite": float(len(lost)),
                "advantage/seconds": watch.seconds,
            },
        )

    async def check_tokens(self, parts: Sequence[Part]) -> None:
        """Look whether the policy's tokenizer reads the tokens of a replay as the one did that made them.

        Raises:
            ConfigError: it does not.
        """
        model, config = await asyncio.to_thread(self._context.model, "policy"), self._config
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            model,
            trust_remote_code=config.run.trust_remote_code,
            use_fast=not config.data.disable_fast_tokenizer,
        )
        rows = await asyncio.to_thread(self._store.read_trajectories, parts[:1])
        check_answers(rows, tokenizer, config.actor.model_name_or_path)

    @in_stage("evaluate")
    async def judge(
        self, parts: Sequence[Part], sample_rows: int
    ) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
        """Score an evaluation: its metrics, its first rows for people, and the outcome of each prompt."""
        rows = await asyncio.to_thread(self._store.read_trajectories, parts)
        answers, _ = await self._score(rows, None)  # as they are: versions are compared
        scored = {(row.group_id, row.sample_index): row.result for row in answers}
        judged = with_rewards(rows, scored)
        readable_rows = [readable(episode) for episode in episodes_of(judged)[:sample_rows]]
        return evaluation_metrics(judged, self._config), readable_rows, outcomes(judged)

    async def samples(self, rollout: StageRef, reward: StageRef, count: int) -> list[dict[str, Any]]:
        """Readable rows for people: the best and the worst first, then others."""
        rows = await asyncio.to_thread(rows_of_batch, self._store, rollout, reward)
        ranked = sorted(
            episodes_of(rows), key=lambda episode: (episode.last.reward is None, -(episode.last.reward or 0.0))
        )
        half = (count + 1) // 2
        picked = ranked if len(ranked) <= count else [*ranked[:half], *ranked[-(count - half) :]]
        return [readable(episode) for episode in picked]

    async def shutdown(self) -> None:
        """End the reward processes."""
        if self._source is not None:
            await self._source.close()
            self._source = None

    async def _score(
        self, rows: Sequence[Trajectory], norm_state: NormState | None
    ) -> tuple[list[RewardRow], NormState]:
        """One reward an episode: the executor's own where it gave one, else the source's, normalised if there is a state."""
        played = sorted(episodes_of(rows), key=lambda episode: episode.key)
        asked = [episode.last for episode in played if not episode.failed and episode.last.reward is None]
        requests = [reward_request(row) for row in asked]
        if self._source is None:  # start() makes one unless the agent is to reward by itself
            answers, norm_state = [UNREWARDED] * len(asked), norm_state or {}
        elif norm_state is None:
            answers, norm_state = await self._source.score(requests), {}
        else:
            answers, norm_state = await self._source.score_normalised(requests, norm_state)
        results = {(row.group_id, row.sample_index): answer for row, answer in zip(asked, answers, strict=True)}
        for episode in played:
            row = episode.last
            if episode.failed:
                results[episode.key] = RewardResult(status=RewardStatus.SKIPPED, error=episode.error)
            elif row.reward is not None:
                score = row.reward if row.score is None else row.score
                results[episode.key] = RewardResult(status=RewardStatus.OK, reward=row.reward, score=score)
            elif row.score is not None and results[episode.key].reward is not None:
                # The agent knows what a success is; what it is worth is the source's to say.
                results[episode.key] = replace(results[episode.key], score=row.score)
        return [RewardRow(*episode.key, results[episode.key]) for episode in played], norm_state


def check_answers(rows: Sequence[Trajectory], tokenizer: Tokenizer, model: str) -> None:
    """``ConfigError`` if answers of one turn read otherwise with this tokenizer than when they were sampled."""
    for row in rows:
        if row.failed or len(row.action_ranges) != 1:
            continue
        start, end = row.action_ranges[0]
        read = tokenizer.decode(row.token_ids[start:end].tolist(), skip_special_tokens=True)
        if read != row.answer:
            raise ConfigError(
                f"actor.model_name_or_path={model!r} reads the tokens of group {row.group_id} as {read[:60]!r}, the run that "
                f"sampled them said {row.answer[:60]!r}: a replay needs a model with the same tokenizer"
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
