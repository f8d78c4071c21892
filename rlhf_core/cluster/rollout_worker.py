"""The process that owns the prompts and plays them through the executor.

::

    cursor ──draw──▶ groups of episodes ──(minus those already published)──▶ in play ──▶ trajectory shards
                                                                             ▲    │
                                              begun by an earlier draw, and ─┘    └─▶ not waited for: the next draw names
                                              not finished by its end                 them, and goes on with them

Calls of ``rollout`` come one after the other; an evaluation may run at the same time, on the same engines.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.agents import Episode, FailureWatch, GroupPublisher, GroupsInPlay, TurnLimits, play
from rlhf_core.agents.loading import Agent, load_agent
from rlhf_core.cluster.engine_lines import EngineLines
from rlhf_core.cluster.image_intake import RunImages
from rlhf_core.cluster.measures import RolloutTally, tally_rollout
from rlhf_core.cluster.published import published_groups
from rlhf_core.data import (
    Vision,
    end_of_sequence_ids,
    evaluation_prompts,
    load_tokenizer,
    sample_seed,
    training_prompts,
)
from rlhf_core.errors import ConfigError
from rlhf_core.records import (
    Draw,
    OpenGroup,
    Part,
    Prompt,
    PromptCursor,
    SamplingParams,
    Trajectory,
    oldest_version_of,
)
from rlhf_core.telemetry import Stopwatch, get_logger, in_stage

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from rlhf_core.agents import AgentExecutorBase
    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.cluster.engine_lines import EngineLine
    from rlhf_core.data import PromptDataset
    from rlhf_core.records import AgentServer, Generate

logger = get_logger(__name__)

Answer = TypeVar("Answer")

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
    drawn: int  # prompts, for the first time
    cursor: PromptCursor  # after the draw
    resumed_groups: int  # found published by an earlier attempt
    tally: RolloutTally
    oldest_versions: dict[str, int] = field(default_factory=dict)  # group -> that spoke in it, where anybody did
    unfinished: tuple[OpenGroup, ...] = ()  # in flight still


class RolloutWorker:
    """Async Ray actor."""

    def __init__(self, context: WorkerContext) -> None:
        context.enter("rollout")
        self._context = context
        self._config = context.config
        self._store = context.store
        self._agent: Agent | None = None
        self._lines: EngineLines | None = None  # made with the agent
        self._in_play: GroupsInPlay | None = None  # of training; they end with the call that fails, or with shutdown()
        self._in_play_on: EngineLine | None = None
        self._calls: dict[str, asyncio.Task[Any]] = {}  # under way, by method

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

    async def groups_in_flight(self) -> int:
        """Groups of training that are being sampled."""
        return 0 if self._in_play is None else len(self._in_play.running)

    async def shutdown(self) -> None:
        """End the calls under way, the groups in play, and the processes of agents."""
        for method in list(self._calls):
            await self._end_call(method)
        if self._in_play is not None:
            await self._in_play.end()
        agent, self._agent, self._lines = self._agent, None, None
        if agent is not None:
            await agent.close()

    @in_stage("rollout")
    async def rollout(self, draw: Draw, engines: Sequence[Any]) -> RolloutOutcome:
        """Sample the groups of a draw; those that an earlier attempt published are not sampled again.

        With ``draw.wanted`` it returns once so many are finished, and the others go on. Where it fails, or is cancelled,
        nothing goes on; what had finished while it waited is published.

        Raises:
            WorkerError: an engine is gone.
            RunFailedError: see ``FailureWatch``.
        """
        return await self._instead("rollout", self._sample(draw, engines))

    @in_stage("evaluate")
    async def evaluate(self, version: int, engines: Sequence[Any]) -> tuple[tuple[Part, ...], dict[str, float]]:
        """Answer the held-out prompts with one policy version. Returns the shards and the rollout metrics."""
        return await self._instead("evaluate", self._examine(version, engines))

    async def _instead(self, method: str, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Do the work of a call; an earlier call of the method, whose caller has given up on it, ends first."""
        await self._end_call(method)
        call = asyncio.create_task(work)
        self._calls[method] = call
        return await call

    async def _end_call(self, method: str) -> None:
        call = self._calls.pop(method, None)
        if call is not None and not call.done():
            call.cancel()
            await asyncio.wait([call])

    # --- rollouts -----------------------------------------------------------------------------------------------------

    async def _sample(self, draw: Draw, engines: Sequence[Any]) -> RolloutOutcome:
        watch = Stopwatch()
        line = await self._line(engines)
        cursor = draw.cursor
        new, after = self._order.draw(cursor, draw.prompts) if draw.prompts else ([], cursor)
        drawn = [PromptCursor(cursor.epoch, cursor.offset + i).group_id for i in range(len(new))]
        named = sorted({*drawn, *draw.again, *(group.group_id for group in draw.unfinished)})  # as they were drawn
        in_play = await self._gone_on_with(draw, named, line)
        try:
            asked = set(named) - in_play.begun_in.keys()
            earlier = await asyncio.to_thread(published_groups, self._store, draw, asked)
            await self._begin(draw, sorted(asked - earlier.places.keys()), line, in_play)
            places = dict(earlier.places)

            def publish(rows: list[Trajectory]) -> Part:
                rows = [replace(row, iteration=draw.iteration, round=draw.round) for row in rows]  # where they lie
                part = self._store.publish_trajectories(draw.iteration, rows)
                places.update({row.group_id: part.path for row in rows})
                return part

            publisher = GroupPublisher(publish, self._config.rollout.publish_groups)
            wanted = None if draw.wanted is None else draw.wanted - len(earlier.places)
            rows = await in_play.finish(publisher, wanted, draw.again)
        except BaseException:
            await in_play.end()
            raise
        if earlier.places:
            already = len(earlier.places)
            logger.info("iteration %d: %d of %d groups were published already", draw.iteration, already, len(named))
        return RolloutOutcome(
            parts=(*earlier.parts, *publisher.parts),
            places=places,
            drawn=len(drawn),
            cursor=after,
            resumed_groups=len(earlier.places),
            tally=tally_rollout(rows, watch.seconds, found=earlier.rows),
            oldest_versions=_oldest_versions([*earlier.rows, *rows]),
            unfinished=in_play.unfinished,
        )

    async def _gone_on_with(self, draw: Draw, named: Collection[str], line: EngineLine) -> GroupsInPlay:
        """What this process plays of the groups of a draw; whatever else it plays ends."""
        if self._in_play is None or not self._in_play.begun_in:
            self._in_play, self._in_play_on = GroupsInPlay(self._executor, self._failure_watch()), line
        in_play, begun_in = self._in_play, self._in_play.begun_in
        if line is not self._in_play_on:  # an engine was made anew
            await in_play.end(in_play.running)
            self._in_play_on = line
        too_old = [group_id for group_id in draw.again if begun_in.get(group_id, draw.iteration) < draw.iteration]
        await in_play.end([*in_play.lost, *too_old, *(begun_in.keys() - set(named))])
        return in_play

    async def _begin(self, draw: Draw, group_ids: Sequence[str], line: EngineLine, in_play: GroupsInPlay) -> None:
        """Play groups from their prompts on."""
        if not group_ids:
            return
        places = [PromptCursor.of_group(group_id) for group_id in group_ids]
        prompts = await self._drawn(self._prompts, [int(self._order.epoch(at.epoch)[at.offset]) for at in places])
        # Asked before, so that none of the tokens is older; what nobody goes on with is not asked for its age.
        since = draw.oldest_version if draw.wanted is None else await line.oldest_version(draw.oldest_version)
        n = self._config.rollout.n_samples_per_prompt
        episodes = self.episodes(
            draw.iteration,
            list(zip(group_ids, prompts, strict=True)),
            n,
            self._training_sampling,
            line.generate,
            round=draw.round,
            server=line.server,
        )
        for group in episodes:
            in_play.begin(group, since)

    # --- evaluations --------------------------------------------------------------------------------------------------

    async def _examine(self, version: int, engines: Sequence[Any]) -> tuple[tuple[Part, ...], dict[str, float]]:
        if self._held_out is None:
            raise ConfigError("eval.dataset is empty: there is nothing to evaluate")
        watch = Stopwatch()
        line = await self._line(engines)
        drawn = await self._drawn(self._held_out, range(len(self._held_out)))
        prompts = [(f"eval-{index:06d}", prompt) for index, prompt in enumerate(drawn)]
        publisher = GroupPublisher(
            lambda rows: self._store.publish_eval_trajectories(version, rows), groups_per_shard=max(1, len(prompts))
        )
        groups = self.episodes(
            version,
            prompts,
            self._config.eval.n_samples_per_prompt,
            self._evaluation_sampling,
            line.generate,
            EVALUATION_SEED,
            server=line.server,
        )
        rows = await play(self._executor, groups, publisher, self._failure_watch())
        return tuple(publisher.parts), tally_rollout(rows, watch.seconds).metrics()

    # --- what both need -----------------------------------------------------------------------------------------------

    @property
    def _executor(self) -> AgentExecutorBase:
        assert self._agent is not None, "start() comes first"
        return self._agent.executor

    def _failure_watch(self) -> FailureWatch:
        rollout = self._config.rollout
        return FailureWatch(rollout.max_consecutive_failures, fail_fast=rollout.on_error == "fail")

    async def _line(self, engines: Sequence[Any]) -> EngineLine:
        assert self._agent is not None, "start() comes first"
        if self._lines is None:
            self._lines = EngineLines(self._config.vllm.request_timeout, with_server=self._agent.needs_server)
        return await self._lines.to(engines)

    async def _drawn(self, dataset: PromptDataset, indices: Sequence[int]) -> list[Prompt]:
        """The prompts, their images durable by now."""
        if self._images is not None:
            await asyncio.to_thread(dataset.keep_images, indices)
        return [dataset[index] for index in indices]

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
        """The groups of a batch: ``samples`` episodes of each prompt, each with a seed of its own.

        ``seed_of``: the number that seeds the samples, where it is not that of the iteration in which they are begun.
        """
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


def _oldest_versions(rows: Sequence[Trajectory]) -> dict[str, int]:
    """Group -> the oldest version that spoke in it; without groups in which nobody did."""
    of_group: dict[str, list[Trajectory]] = {}
    for row in rows:
        of_group.setdefault(row.group_id, []).append(row)
    found = {group_id: oldest_version_of(members) for group_id, members in of_group.items()}
    return {group_id: version for group_id, version in found.items() if version is not None}
