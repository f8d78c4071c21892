"""The process that owns the prompts and plays them through the executor.

::

    cursor ──draw──▶ groups of episodes ──(minus those already published)──▶ play ──▶ trajectory shards
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents import Episode, FailureWatch, GroupPublisher, SingleTurnAgentExecutor, play
from rlhf_core.cluster.measures import RolloutTally, tally_rollout
from rlhf_core.cluster.router import EngineRouter
from rlhf_core.data import evaluation_prompts, load_tokenizer, sample_seed, training_prompts
from rlhf_core.errors import ConfigError
from rlhf_core.records import Draw, Part, Prompt, PromptCursor, SamplingParams, Stage, Trajectory
from rlhf_core.telemetry import Stopwatch, get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.records import Generate

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
    """What a rollout, or a round of one, left behind."""

    parts: tuple[Part, ...]
    places: dict[str, str]  # group -> path of the part with its rows
    drawn: int
    cursor: PromptCursor  # after the draw
    resumed_groups: int  # found published by an earlier attempt
    tally: RolloutTally


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
        model = self._context.model("policy")
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

    async def rollout(self, draw: Draw, engines: Sequence[Any]) -> RolloutOutcome:
        """Sample the prompts of a draw; groups that an earlier attempt published are not sampled again."""
        watch = Stopwatch()
        indices, after = self._order.draw(draw.cursor, draw.prompts)
        cursor = draw.cursor
        drawn = {f"{cursor.epoch:04d}-{cursor.offset + i:08d}": self._prompts[j] for i, j in enumerate(indices)}
        old_parts, published = await asyncio.to_thread(self._published, draw, drawn.keys())
        missing = [(group_id, prompt) for group_id, prompt in drawn.items() if group_id not in published]
        places = {row.group_id: part.path for part, rows in old_parts for row in rows}

        def publish(rows: list[Trajectory]) -> Part:
            part = self._store.publish_trajectories(draw.iteration, rows)
            places.update({row.group_id: part.path for row in rows})
            return part

        publisher = GroupPublisher(publish, self._config.rollout.publish_groups)
        n = self._config.rollout.n_samples_per_prompt
        new = await self._play(
            draw.iteration, missing, n, self._training_sampling, publisher, engines, round=draw.round
        )
        if published:
            logger.info(
                "iteration %d: %d of %d groups were published already", draw.iteration, len(published), len(drawn)
            )
        return RolloutOutcome(
            parts=(*(part for part, _ in old_parts), *publisher.parts),
            places=places,
            drawn=len(drawn),
            cursor=after,
            resumed_groups=len(published),
            tally=tally_rollout(new, watch.seconds, found=[row for _, rows in old_parts for row in rows]),
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
        return tuple(publisher.parts), tally_rollout(rows, watch.seconds).metrics()

    async def _play(
        self,
        iteration: int,
        prompts: Sequence[tuple[str, Prompt]],
        samples: int,
        sampling: SamplingParams,
        publisher: GroupPublisher,
        engines: Sequence[Any],
        seed_of: int | None = None,
        round: int = 0,
    ) -> list[Trajectory]:
        """All rows; ``seed_of``: the number that seeds the samples, where it is not the iteration's."""
        config = self._config
        await asyncio.gather(*(engine.drop_requests.remote() for engine in engines))
        router = EngineRouter(engines, config.vllm.request_timeout)
        watch = FailureWatch(config.rollout.max_consecutive_failures, fail_fast=config.rollout.on_error == "fail")
        groups = self.episodes(iteration, prompts, samples, sampling, router, seed_of, round)
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
        round: int = 0,
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
                round=round,
            )

        return [[episode(group_id, prompt, i) for i in range(samples)] for group_id, prompt in prompts]

    def _published(
        self, draw: Draw, group_ids: Collection[str]
    ) -> tuple[list[tuple[Part, list[Trajectory]]], set[str]]:
        """Whole shards that an earlier attempt at the draw left, with their rows, and their groups.

        Superseded are shards of another policy version, and of groups with a failed sample: what failed then (a broken
        environment, an engine that died) deserves another try, and ``rollout.on_error`` its say.
        """
        found: list[tuple[Part, list[Trajectory]]] = []
        groups: set[str] = set()
        for part in self._store.published_parts(draw.iteration, Stage.ROLLOUT, without=draw.recorded):
            rows = self._store.read_trajectories([part])
            held = {row.group_id for row in rows}
            if not held <= set(group_ids):
                logger.warning("%s holds groups that are not of this draw: superseded, not trained", part.path)
            elif any(span.version != draw.version for row in rows for span in row.version_spans):
                logger.warning("%s is not of policy version %d: superseded, not trained", part.path, draw.version)
            elif any(row.failed for row in rows):
                logger.warning("%s holds failed samples: superseded, sampled again", part.path)
            elif held & groups:
                logger.warning("%s repeats group %s: superseded, not trained", part.path, min(held & groups))
            else:
                found.append((part, rows))
                groups |= held
        return found, groups

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
