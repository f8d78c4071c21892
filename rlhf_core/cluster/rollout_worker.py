"""The process that owns the prompts and plays them through the executor.

::

    cursor ──draw──▶ groups of episodes ──(minus those already published)──▶ play ──▶ trajectory shards
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents import Episode, FailureWatch, GroupPublisher, TurnLimits, play
from rlhf_core.agents.loading import Agent, load_agent
from rlhf_core.cluster.image_intake import RunImages
from rlhf_core.cluster.measures import RolloutTally, tally_rollout
from rlhf_core.cluster.router import EngineRouter
from rlhf_core.cluster.session_router import SessionRouter
from rlhf_core.data import (
    Vision,
    end_of_sequence_ids,
    evaluation_prompts,
    load_tokenizer,
    sample_seed,
    training_prompts,
)
from rlhf_core.errors import ConfigError
from rlhf_core.records import Draw, Part, Prompt, PromptCursor, SamplingParams, Stage, Trajectory, episodes_of
from rlhf_core.telemetry import Stopwatch, get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.data import PromptDataset
    from rlhf_core.records import AgentServer, Generate

logger = get_logger(__name__)

# Evaluations sample with the same seeds whatever the version: two versions differ by their weights, not by their luck.
EVALUATION_SEED = -1


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What the run's prompts are."""

    prompts: int  # of one epoch
    dropped: int  # overlong
    fingerprint: str  # of every row: a resumed run must see the same
    vision: dict[str, Any] | None = None  # what decides the pixel values of its images; None: it shows none


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
        self._agent: Agent | None = None

    async def start(self) -> DataFacts:
        """Load tokenizer, prompts and agent."""
        config = self._config
        model = self._context.model("policy")
        options = {
            "trust_remote_code": config.run.trust_remote_code,
            "use_fast": not config.data.disable_fast_tokenizer,
        }
        self._tokenizer = load_tokenizer(model, **options)
        self._end_ids = frozenset(end_of_sequence_ids(model, self._tokenizer))
        await self.shutdown()
        self._agent = await load_agent(config, {"name": model, **options})
        self._images = await asyncio.to_thread(RunImages.of, config, model, self._store)
        vision = None if self._images is None else Vision(self._images.processor, self._images)
        tools = self._agent.tools
        self._prompts = training_prompts(config, self._tokenizer, tools, vision)
        self._order = self._prompts.order(config.train.seed, config.data.prompt_probs)
        self._held_out = evaluation_prompts(config, self._tokenizer, tools, vision) if config.eval.dataset else None
        return DataFacts(
            prompts=self._order.size,
            dropped=self._prompts.overlong,
            fingerprint=self._prompts.fingerprint(),
            vision=None if vision is None else vision.processor.description,
        )

    async def ping(self) -> None:
        """Answer."""

    async def shutdown(self) -> None:
        """End the processes of agents."""
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close()

    async def rollout(self, draw: Draw, engines: Sequence[Any]) -> RolloutOutcome:
        """Sample the prompts of a draw; groups that an earlier attempt published are not sampled again."""
        watch = Stopwatch()
        indices, after = self._order.draw(draw.cursor, draw.prompts)
        cursor = draw.cursor
        prompts = await self._drawn(self._prompts, indices)
        drawn = {f"{cursor.epoch:04d}-{cursor.offset + i:08d}": prompt for i, prompt in enumerate(prompts)}
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
        drawn = await self._drawn(self._held_out, range(len(self._held_out)))
        prompts = [(f"eval-{index:06d}", prompt) for index, prompt in enumerate(drawn)]
        publisher = GroupPublisher(
            lambda rows: self._store.publish_eval_trajectories(version, rows), groups_per_shard=max(1, len(prompts))
        )
        n = self._config.eval.n_samples_per_prompt
        rows = await self._play(version, prompts, n, self._evaluation_sampling, publisher, engines, EVALUATION_SEED)
        return tuple(publisher.parts), tally_rollout(rows, watch.seconds).metrics()

    async def _drawn(self, dataset: PromptDataset, indices: Sequence[int]) -> list[Prompt]:
        """The prompts, their images durable by now."""
        if self._images is not None:
            await asyncio.to_thread(dataset.keep_images, indices)
        return [dataset[index] for index in indices]

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
        assert self._agent is not None, "start() comes first"
        await asyncio.gather(*(engine.drop_requests.remote() for engine in engines))
        router = EngineRouter(engines, config.vllm.request_timeout)
        server = SessionRouter(engines) if self._agent.needs_server else None
        watch = FailureWatch(config.rollout.max_consecutive_failures, fail_fast=config.rollout.on_error == "fail")
        groups = self.episodes(iteration, prompts, samples, sampling, router, seed_of, round, server)
        try:
            return await play(self._agent.executor, groups, publisher, watch)
        finally:
            await router.close()
            if server is not None:
                await server.close()

    def episodes(
        self,
        iteration: int,
        prompts: Sequence[tuple[str, Prompt]],
        samples: int,
        sampling: SamplingParams,
        generate: Generate,
        seed_of: int | None = None,
        round: int = 0,
        server: AgentServer | None = None,
    ) -> list[list[Episode]]:
        """The groups of a batch: ``samples`` episodes of each prompt, each with a seed of its own."""
        config = self._config
        drawn_in = iteration if seed_of is None else seed_of
        limits = TurnLimits(config.agent.max_turns, config.agent.max_turn_tokens or config.rollout.max_new_tokens)

        def episode(group_id: str, prompt: Prompt, sample: int) -> Episode:
            seed = sample_seed(config.train.seed, drawn_in, prompt.row_id, sample)
            return Episode(
                run_id=self._context.run_id,
                iteration=iteration,
                prompt=prompt,
                group_id=group_id,
                sample_index=sample,
                sampling=replace(sampling, seed=seed),
                max_len=config.data.max_len,
                generate=generate,
                tokenizer=self._tokenizer,
                round=round,
                # The same for all samples of the prompt, and none of theirs.
                environment_seed=sample_seed(config.train.seed, drawn_in, prompt.row_id, -1),
                end_ids=self._end_ids,
                limits=limits,
                tools=() if self._agent is None else self._agent.tools,
                chat_template=config.data.tokenizer_chat_template
                or (self._images.processor.chat_template if self._images is not None else None),
                images=self._images,
                server=server,
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
            elif any(episode.failed for episode in episodes_of(rows)):
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
