"""Episodes of several turns: the policy acts, an environment answers, until one of them ends it.

::

    reset ─▶ observation ─▶ generate ─▶ action ─▶ step ─▶ feedback ─▶ generate ─▶ … ─▶ step: done, or a limit
               mask 0                   mask 1             mask 0

    limits    a turn: agent.max_turn_tokens    all turns: rollout.max_new_tokens    context: data.max_len    agent.max_turns

The sampled ids are the truth: what the environment says is put behind them, and they are never made again from text. Where
the chat template allows no continuation the conversation is rendered anew, as a new segment of the episode.

``step`` hears every action, also one that was cut off, so that it can be rewarded. Then the first that holds ends the episode:

1. the action was cut off by the last of all tokens (LENGTH) or by the context (CONTEXT_FULL), whatever the environment says
2. the environment is done (DONE)
3. no token is left (LENGTH), nor room in the context (CONTEXT_FULL)
4. it was the last turn (MAX_TURNS)
5. the feedback leaves no room for another action in the context (CONTEXT_FULL): it is dropped, never cut
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.environment.answers import Observation, Step, read_observation, read_step
from rlhf_core.agents.environment.sampling import as_given, asked_tokens
from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.multi_turn.observations import Shown, feedback_behind, first_observation, rendered_anew
from rlhf_core.agents.segment import Segment, decode
from rlhf_core.errors import AgentError
from rlhf_core.records import GenerateRequest, SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from rlhf_core.agents.environment.answers import Messages
    from rlhf_core.agents.environment.base import Environment, EnvironmentSource
    from rlhf_core.agents.episode import Episode, TurnLimits
    from rlhf_core.records import Generation

METRIC = "agent/"  # before the names of an executor's metrics


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays episodes in environments, one each."""

    def __init__(self, environments: EnvironmentSource) -> None:
        self._environments = environments

    async def execute(self, episode: Episode) -> list[Trajectory]:
        """See the base class."""
        async with self._environments.open(episode.environment_seed) as environment:
            return await _Play(episode, environment).run()


class _Play:
    """One episode."""

    def __init__(self, episode: Episode, environment: Environment) -> None:
        self._episode = episode
        self._limits = limits_of(episode)
        self._environment = environment
        self._segments: list[Segment] = []
        self._ends: list[dict[str, Any]] = []  # fields of the rows before the present one
        self._prompt = episode.prompt.text  # of the present segment, for people
        self._messages: Messages | None = None  # what was said so far, where it is known as chat messages
        self._answer = ""
        self._max_tokens: int | None = None  # of the next turn, as the environment wants it
        self._rewards: list[float] = []
        self._score: float | None = None
        self._logs: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    async def run(self) -> list[Trajectory]:
        await self._reset()
        turn = 0
        while True:
            before = self._prompt + self._segment.text(self._episode.tokenizer, self._prompt_tokens)
            generation = await self._act(turn)
            step = await self._step(turn, before, generation)
            stop = await self._after(turn, generation, step)
            if stop is not None:
                return self._rows(stop, turn + 1)
            turn += 1

    # --- one turn ----------------------------------------------------------------------------------------------------

    async def _reset(self) -> None:
        prompt = self._episode.prompt
        answer = await self._environment.call(
            "reset",
            {
                "observation": prompt.text,
                "prompt": prompt.text,
                "label": prompt.label,
                "messages": prompt.messages,
                "datasource": prompt.datasource,
                "seed": self._episode.environment_seed,
                "sample": self._episode.sample_index,
            },
        )
        observation = read_observation(answer, prompt.text)
        shown = await first_observation(self._episode, observation)
        if isinstance(observation.said, list):
            self._messages = list(observation.said)
        elif shown.text == prompt.text and prompt.messages is not None:
            self._messages = list(prompt.messages)
        self._begin(shown)
        if self._context_left < 1:
            raise AgentError(
                f"the first observation has {len(self._segment)} tokens and leaves no room for an action in "
                f"data.max_len={self._episode.max_len}: make it shorter, or raise data.max_len"
            )

    def _begin(self, shown: Shown) -> None:
        self._prompt, self._prompt_tokens = shown.text, len(shown.token_ids)
        self._segment = Segment(shown.token_ids, shown.images)
        self._segments.append(self._segment)

    async def _act(self, turn: int) -> Generation:
        """The policy's turn."""
        episode = self._episode
        generation = await episode.generate.generate(
            GenerateRequest(
                request_id=f"{episode.request_id}-t{turn}",
                prompt_token_ids=list(self._segment.token_ids),
                sampling=turn_sampling(episode.sampling, turn, self._room),
                affinity=episode.group_id,
                images=tuple(self._segment.images),
                continues=turn > 0,
            )
        )
        self._segment.act(generation)
        self._counts["tokens"] += len(generation.token_ids)
        self._answer = episode.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return generation

    async def _step(self, turn: int, before: str, generation: Generation) -> Step:
        """The environment's."""
        sampling = self._episode.sampling
        answer = await self._environment.call(
            "step",
            {
                "observation_text": before,
                "action_text": self._action_text(generation),
                "label": self._episode.prompt.label,
                "sampling_params": as_given(sampling, self._max_tokens or self._limits.max_turn_tokens),
                "turn": turn,
                "tokens_left": self._tokens_left,
                "context_left": self._context_left,
            },
        )
        step = read_step(answer)
        if step.sampling is not None:
            self._max_tokens = asked_tokens(step.sampling, sampling, f"sampling_params of step {turn}")
        if step.reward is not None:
            self._segment.reward(step.reward)
            self._rewards.append(step.reward)
        self._score = self._score if step.score is None else step.score
        self._logs |= step.logs
        self._counts["dropped_logs"] += step.dropped_logs
        return step

    async def _after(self, turn: int, generation: Generation, step: Step) -> StopReason | None:
        """Why the episode ends here; None: it goes on, and the feedback is told."""
        cut = generation.stop_reason.truncated
        used_up = StopReason.LENGTH if self._tokens_left < 1 else None
        full = StopReason.CONTEXT_FULL if self._context_left < 1 else None
        if cut and (used_up or full):
            return used_up or full
        self._counts["cut_turns"] += cut
        if step.done:
            return StopReason.DONE
        if used_up or full:
            return used_up or full
        if turn + 1 >= self._limits.max_turns:
            return StopReason.MAX_TURNS
        assert step.feedback is not None, "read_step wants it of an episode that goes on"
        return None if await self._hear(step.feedback) else StopReason.CONTEXT_FULL

    async def _hear(self, feedback: Observation) -> bool:
        """Put the feedback behind the action; False if no action would fit behind it."""
        messages = None if self._messages is None else [*self._messages, self._answer_message, *_messages(feedback)]
        shown = await feedback_behind(self._episode, self._segment.token_ids[-1], feedback)
        if shown is not None:
            if len(shown.token_ids) >= self._context_left:
                return False
            self._segment.hear(shown.token_ids, shown.images)
            self._messages = messages
            return True
        if messages is None:
            raise AgentError(
                "the chat template allows no continuation by the environment's messages, and the prompt is no chat that "
                "could be rendered anew: answer text in environment_feedback"
            )
        if self._segment.images or feedback.images:
            raise AgentError(
                "the chat template allows no continuation by the environment's messages, and a conversation with images is "
                "not rendered anew: answer text in environment_feedback"
            )
        shown = await rendered_anew(self._episode, messages, ())
        if len(shown.token_ids) >= self._episode.max_len:
            return False
        self._ends.append(self._fields)
        self._begin(shown)
        self._messages = messages
        return True

    # --- what is left -------------------------------------------------------------------------------------------------

    @property
    def _tokens_left(self) -> int:
        """Of all turns together."""
        return self._episode.sampling.max_tokens - self._counts["tokens"]

    @property
    def _context_left(self) -> int:
        return self._episode.max_len - len(self._segment)

    @property
    def _room(self) -> int:
        """Tokens the next turn may have."""
        return min(self._tokens_left, self._context_left, self._limits.max_turn_tokens, self._max_tokens or 2**31)

    # --- what was said ------------------------------------------------------------------------------------------------

    def _action_text(self, generation: Generation) -> str:
        """The action without the token that closes it."""
        said = generation.token_ids[:-1] if generation.stop_reason is StopReason.EOS else generation.token_ids
        return decode(self._episode.tokenizer, list(said))

    @property
    def _answer_message(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self._answer}

    @property
    def _fields(self) -> dict[str, Any]:
        """What people and reward functions read of the present segment."""
        return {
            "prompt": self._prompt,
            "messages": self._messages,
            "answer": self._answer,
            "transcript": self._segment.transcript(self._episode.tokenizer),
        }

    def _rows(self, stop: StopReason, turns: int) -> list[Trajectory]:
        reward = sum(self._rewards) if self._rewards else None
        counts = {"turns": turns, "cut_turns": self._counts["cut_turns"], "dropped_logs": self._counts["dropped_logs"]}
        metrics = {f"{METRIC}{name}": float(value) for name, value in {**counts, **self._logs}.items()}
        return [
            segment.trajectory(
                self._episode,
                stop,
                segment_index=index,
                reward=reward,
                score=reward if self._score is None else self._score,
                metrics=metrics,
                **fields,
            )
            for index, (segment, fields) in enumerate(zip(self._segments, [*self._ends, self._fields], strict=True))
        ]


def limits_of(episode: Episode) -> TurnLimits:
    """The limits of an episode of several turns."""
    if episode.limits is None:
        raise AgentError(f"episode {episode.request_id} has no limits of turns")
    return episode.limits


def turn_sampling(sampling: SamplingParams, turn: int, room: int) -> SamplingParams:
    """Settings of one turn: a seed of its own, and no more tokens than there is room for."""
    seed = sampling.seed
    if seed is not None and turn:
        digest = hashlib.sha256(f"turn/{seed}/{turn}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") % 2**31
    return replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room), seed=seed)


def _messages(feedback: Observation) -> Messages:
    return [{"role": "user", "content": feedback.said}] if isinstance(feedback.said, str) else feedback.said
