"""The process that owns the prompts and plays them through the executor.

::

    cursor ──draw──▶ groups of episodes ──(minus those already published)──▶ play ──▶ trajectory shards
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents import Episode, FailureWatch, GroupPublisher, SingleTurnAgentExecutor, play
from rlhf_core.cluster.measures import rollout_metrics
from rlhf_core.cluster.router import EngineRouter
from rlhf_core.data import evaluation_prompts, load_tokenizer, resolve_model, sample_seed, training_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.records import Prompt, PromptCursor, SamplingParams, Stage, Trajectory
from rlhf_core.telemetry import Stopwatch, get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.records import Generate, Part

logger = get_logger(__name__)

# Evaluations sample with the same seeds whatever the version: two versions differ by their weights, not by their luck.
EVALUATION_SEED = -1


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the run's prompts are."""

    prompts: int  # of one epoch
    dropped: int  # overlong
    fingerprint: str  # of every row: a resumed run must see the same


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """What a rollout left behind."""

    parts: tuple[Part, ...]
    drawn: int
    cursor: PromptCursor  # after the draw
    resumed_groups: int  # found published by an earlier attempt
    metrics: dict[str, float]


class RolloutWorker:
    """Async Ray actor."""

    def __init__(self, context: WorkerContext) -> None:
        context.enter("rollout")
        self._context = context
        self._config = context.config
        self._store = context.store
        self._executor = SingleTurnAgentExecutor()

    async def start(self) -> DataFacts:
        """Load tokenizer and prompts."""
        config = self._config
        model = resolve_model(config.actor.model_name_or_path, self._context.model_cache)
        self._tokenizer = load_tokenizer(
            model,
            trust_remote_code=config.run.trust_remote_code,
            use_fast=not config.data.disable_fast_tokenizer,
        )
        self._prompts = training_prompts(config, self._tokenizer)
        self._order = self._prompts.order(config.train.seed, config.data.prompt_probs)
        self._held_out = evaluation_prompts(config, self._tokenizer) if config.eval.dataset else None
        return DataFacts(
            prompts=self._order.size,
            dropped=self._prompts.overlong,
            fingerprint=self._prompts.fingerprint(),
        )

    async def ping(self) -> None:
        """Answer."""

    async def rollout(
        self, iteration: int, version: int, cursor: PromptCursor, engines: Sequence[Any]
    ) -> RolloutOutcome:
        """Sample the next batch of prompts; groups that an earlier attempt published are not sampled again."""
        watch = Stopwatch()
        indices, after = self._order.draw(cursor, self._config.rollout.batch_size)
        drawn = [(f"{cursor.epoch:04d}-{cursor.offset + i:08d}", self._prompts[j]) for i, j in enumerate(indices)]
        old_parts, published = await asyncio.to_thread(self._published, iteration, version)
        missing = [(group_id, prompt) for group_id, prompt in drawn if group_id not in published]
        publisher = GroupPublisher(
            lambda rows: self._store.publish_trajectories(iteration, rows), self._config.rollout.publish_groups
        )
        sampling = self._training_sampling
        n = self._config.rollout.n_samples_per_prompt
        new = await self._play(iteration, missing, n, sampling, publisher, engines)
        if published:
            logger.info("iteration %d: %d of %d groups were published already", iteration, len(published), len(drawn))
        old = [row for rows in published.values() for row in rows]
        return RolloutOutcome(
            parts=(*old_parts, *publisher.parts),
            drawn=len(drawn),
            cursor=after,
            resumed_groups=len(published),
            metrics=rollout_metrics(new, watch.seconds, found=old),
        )

    async def evaluate(self, version: int, engines: Sequence[Any]) -> tuple[tuple[Part, ...], dict[str, float]]:
        """Answer the held-out prompts with one policy version. Returns the shards and the rollout metrics."""
        if self._held_out is None:
            raise ConfigError("eval.dataset is empty: there is nothing to evaluate")
        watch = Stopwatch()
        prompts = [(f"eval-{index:06d}", prompt) for index, prompt in enumerate(self._held_out)]
        publisher = GroupPublisher(
            lambda rows: self._store.publish_eval_trajectories(version, rows), groups_per_shard=max(1, len(prompts))
        )
        n = self._config.eval.n_samples_per_prompt
        rows = await self._play(version, prompts, n, self._evaluation_sampling, publisher, engines, EVALUATION_SEED)
        return tuple(publisher.parts), rollout_metrics(rows, watch.seconds)

    async def _play(
        self,
        iteration: int,
        prompts: Sequence[tuple[str, Prompt]],
        samples: int,
        sampling: SamplingParams,
        publisher: GroupPublisher,
        engines: Sequence[Any],
        seed_of: int | None = None,
    ) -> list[Trajectory]:
        """All rows; ``seed_of``: the number that seeds the samples, where it is not the iteration's."""
        config = self._config
        await asyncio.gather(*(engine.drop_requests.remote() for engine in engines))
        router = EngineRouter(engines, config.vllm.request_timeout)
        watch = FailureWatch(config.rollout.max_consecutive_failures, fail_fast=config.rollout.on_error == "fail")
        groups = self.episodes(iteration, prompts, samples, sampling, router, seed_of)
        try:
            return await play(self._executor, groups, publisher, watch)
        finally:
            await router.close()

    def episodes(
        self,
        iteration: int,
        prompts: Sequence[tuple[str, Prompt]],
        samples: int,
        sampling: SamplingParams,
        generate: Generate,
        seed_of: int | None = None,
    ) -> list[list[Episode]]:
        """The groups of a batch: ``samples`` episodes of each prompt, each with a seed of its own."""
        drawn_in = iteration if seed_of is None else seed_of

        def episode(group_id: str, prompt: Prompt, sample: int) -> Episode:
            seed = sample_seed(self._config.train.seed, drawn_in, prompt.row_id, sample)
            return Episode(
                run_id=self._context.run_id,
                iteration=iteration,
                prompt=prompt,
                group_id=group_id,
                sample_index=sample,
                sampling=replace(sampling, seed=seed),
                max_len=self._config.data.max_len,
                generate=generate,
                tokenizer=self._tokenizer,
            )

        return [[episode(group_id, prompt, i) for i in range(samples)] for group_id, prompt in prompts]

    def _published(self, iteration: int, version: int) -> tuple[list[Part], dict[str, list[Trajectory]]]:
        """Whole shards of an earlier attempt, and their groups.

        Superseded are shards of another policy version, and of groups with a failed sample: what failed then (a broken
        environment, an engine that died) deserves another try, and ``rollout.on_error`` its say.
        """
        parts: list[Part] = []
        groups: dict[str, list[Trajectory]] = defaultdict(list)
        for part in self._store.published_parts(iteration, Stage.ROLLOUT):
            rows = self._store.read_trajectories([part])
            if any(span.version != version for row in rows for span in row.version_spans):
                logger.warning("%s is not of policy version %d: superseded, not trained", part.path, version)
                continue
            if any(row.failed for row in rows):
                logger.warning("%s holds failed samples: superseded, sampled again", part.path)
                continue
            known = {row.group_id for row in rows} & groups.keys()
            if known:
                logger.warning("%s repeats group %s: superseded, not trained", part.path, min(known))
                continue
            parts.append(part)
            for row in rows:
                groups[row.group_id].append(row)
        return parts, dict(groups)

    @property
    def _training_sampling(self) -> SamplingParams:
        rollout = self._config.rollout
        return SamplingParams(
            max_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_tokens=rollout.min_new_tokens,
            stop=rollout.stop,
            ignore_eos=rollout.ignore_eos,
        )

    @property
    def _evaluation_sampling(self) -> SamplingParams:
        rollout = self._config.rollout
        return SamplingParams(
            max_tokens=rollout.max_new_tokens,
            temperature=self._config.eval.temperature,
            stop=rollout.stop,
            ignore_eos=rollout.ignore_eos,
        )
