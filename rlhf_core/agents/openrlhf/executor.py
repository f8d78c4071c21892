"""A user's executor in OpenRLHF's style, which runs its own loop over ``llm_engine.generate``.

::

    this process                                          the executor's own process (process.py)
    ── begin {prompt, label, sampling, …} ─────────────▶  execute(prompt, label, sampling_params, …, llm_engine)
    ◀─────────── asked: [{prompt ids, max_tokens}] ─────      await llm_engine.generate(ids, sampling_params)
    engine ─▶ record ── go_on {answers} ───────────────▶      outputs[0].token_ids, .logprobs, .text, …
    ◀─────────────────── result: the returned dict ─────  return {"observation_tokens": …, "action_ranges": …, …}

Log-probs and policy versions of the row are those that the engine gave. An action range that the engine did not say in this
very context, or a log-prob that is not its own, is an error of the sample: it would be trained as what it is not.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.agents.environment.answers import number
from rlhf_core.agents.environment.sampling import as_given, asked_tokens
from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.multi_turn.executor import METRIC, limits_of, turn_sampling
from rlhf_core.agents.segment import Segment, decode
from rlhf_core.errors import AgentError
from rlhf_core.processes.values import shown
from rlhf_core.records import GenerateRequest, Generation, StopReason, Trajectory, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.agents.environment.base import Environment, EnvironmentSource
    from rlhf_core.agents.episode import Episode

LOGPROB_TOLERANCE = 1e-3  # between what the engine gave and what came back: files may keep them as float16
RESULT_KEYS = ("observation_tokens", "action_ranges")


class OpenRlhfExecutor(AgentExecutorBase):
    """Plays episodes by user executors, one process each."""

    def __init__(self, environments: EnvironmentSource) -> None:
        self._environments = environments

    async def execute(self, episode: Episode) -> list[Trajectory]:
        """See the base class."""
        engine = _Engine(episode)
        async with self._environments.open(episode.environment_seed) as environment:
            result = await self._played(episode, environment, engine)
        return [to_trajectory(episode, engine.said, result)]

    async def _played(self, episode: Episode, environment: Environment, engine: _Engine) -> dict[str, Any]:
        message = await environment.call("begin", begin_payload(episode))
        while "result" not in message:
            answers = await asyncio.gather(*(engine.answer(asked) for asked in message["asked"]))
            message = await environment.call("go_on", {"answers": answers})
        return dict(message["result"])


class _Engine:
    """Answers what the executor asks, and keeps what was said."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._asked = 0
        self._spent = 0  # tokens
        self.said: list[tuple[list[int], Generation]] = []  # (prompt, completion), in the order of the answers

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        episode, prompt = self._episode, [int(token) for token in asked["prompt_token_ids"]]
        number_of_call, self._asked = self._asked, self._asked + 1
        wanted = asked_tokens(asked["sampling"], episode.sampling, "sampling_params of llm_engine.generate")
        limits = limits_of(episode)
        left = episode.sampling.max_tokens - self._spent
        room = min(left, episode.max_len - len(prompt), limits.max_turn_tokens, *([wanted] if wanted else []))
        if room < 1:
            reached = "rollout.max_new_tokens" if left < 1 else "data.max_len"
            return _refused(
                asked, f"{reached} is reached: end the episode where finish_reason is 'length', or raise it"
            )
        if number_of_call >= limits.max_turns:
            return _refused(
                asked, f"agent.max_turns={limits.max_turns} calls are used up: end the episode before, or raise it"
            )
        images = episode.prompt.images
        shows_images = images and prompt[: images[-1].end] == episode.prompt.token_ids[: images[-1].end]
        generation = await episode.generate.generate(
            GenerateRequest(
                request_id=f"{episode.request_id}-t{number_of_call}",
                prompt_token_ids=prompt,
                sampling=turn_sampling(episode.sampling, number_of_call, room),
                affinity=episode.group_id,
                images=images if shows_images else (),
                continues=number_of_call > 0,
            )
        )
        self.said.append((prompt, generation))
        self._spent += len(generation.token_ids)
        return {
            "id": asked["id"],
            "token_ids": list(generation.token_ids),
            "logprobs": list(generation.logprobs),
            "text": decode(episode.tokenizer, list(generation.token_ids)),
            "finish_reason": "length" if generation.stop_reason.truncated else "stop",
            "stop_reason": generation.stop_detail or None,
            "version": max(span.version for span in generation.version_spans),
        }


def _refused(asked: dict[str, Any], reason: str) -> dict[str, Any]:
    return {"id": asked["id"], "error": reason}


def begin_payload(episode: Episode) -> dict[str, Any]:
    """What the executor's process is told of an episode."""
    prompt, limits = episode.prompt, limits_of(episode)
    return {
        "prompt": prompt.text,
        "prompt_token_ids": list(prompt.token_ids),
        "label": prompt.label,
        "messages": prompt.messages,
        "datasource": prompt.datasource,
        "row_id": prompt.row_id,
        "sampling": as_given(episode.sampling, episode.sampling.max_tokens),
        "max_len": episode.max_len,
        "max_turns": limits.max_turns,
        "max_turn_tokens": limits.max_turn_tokens,
        "seed": episode.environment_seed,
        "sample": episode.sample_index,
        "group_id": episode.group_id,
        "end_ids": sorted(episode.end_ids),
        "chat_template": episode.chat_template,
    }


def to_trajectory(episode: Episode, said: Sequence[tuple[list[int], Generation]], result: dict[str, Any]) -> Trajectory:
    """The row of a returned dict.

    Args:
        episode: what was played.
        said: prompts and completions, as the engine knows them.
        result: plain JSON of the dict.

    Raises:
        AgentError: a key is missing or of a wrong type, or the dict contradicts the engine.
    """
    tokens, ranges, logprobs = _tokens(result), _ranges(result), result.get("rollout_log_probs")
    if not ranges or ranges[0][0] < 1:
        raise AgentError(f"execute returned action_ranges={ranges}: an action comes after at least one token")
    segment, cut = Segment(tokens[: ranges[0][0]], episode.prompt.images), False
    for (start, end), following in zip(ranges, [*(first for first, _ in ranges[1:]), ranges[-1][1]], strict=True):
        spoken = _spoken(said, tokens, start, end)
        _check_logprobs(logprobs, spoken, start)
        segment.act(spoken)
        segment.hear(tokens[end:following])
        cut = spoken.stop_reason.truncated
    reward = result.get("reward")
    reward = None if reward is None else number(reward, "reward of execute")
    score = result.get("scores")
    score = reward if score is None else number(score, "scores of execute")
    truncated = bool(number(result.get("truncated") or False, "truncated of execute")) or cut
    full = len(segment) >= episode.max_len
    stop = StopReason.DONE if not truncated else StopReason.CONTEXT_FULL if full else StopReason.LENGTH
    start, end = ranges[-1]
    logs = {"turns": float(len(ranges)), "dropped_logs": float(result["dropped_logs"]), **result["logs"]}
    return segment.trajectory(
        episode,
        stop,
        reward=reward,
        score=score,
        answer=episode.tokenizer.decode(tokens[start:end], skip_special_tokens=True),
        transcript=segment.transcript(episode.tokenizer),
        metrics={f"{METRIC}{name}": value for name, value in logs.items()},
    )


def _tokens(result: dict[str, Any]) -> list[int]:
    tokens = result.get("observation_tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise AgentError(f"execute returned observation_tokens of {shown(tokens)}: a list of token ids is wanted")
    return tokens


def _ranges(result: dict[str, Any]) -> list[tuple[int, int]]:
    """In order, without overlap."""
    ranges, end = result.get("action_ranges"), 0
    if not isinstance(ranges, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in ranges):
        raise AgentError(f"execute returned action_ranges of {shown(ranges)}: a list of (start, end) is wanted")
    total = len(result["observation_tokens"])
    for start, stop in ranges:
        if not end <= start < stop <= total:
            raise AgentError(f"execute returned action_ranges={ranges}: ordered ranges of {total} tokens are wanted")
        end = stop
    return [(start, stop) for start, stop in ranges]


def _spoken(said: Sequence[tuple[list[int], Generation]], tokens: list[int], start: int, end: int) -> Generation:
    """What the engine said at ``[start, end)``: the whole of a completion, or its beginning."""
    for prompt, generation in said:
        if generation.token_ids[: end - start] == tokens[start:end] and prompt == tokens[:start]:
            kept = end - start
            if kept == len(generation.token_ids):
                return generation
            spans = [
                VersionSpan(s.start, min(s.end, kept), s.version) for s in generation.version_spans if s.start < kept
            ]
            shorter = generation.token_ids[:kept], generation.logprobs[:kept], spans
            return replace(
                generation,
                token_ids=shorter[0],
                logprobs=shorter[1],
                version_spans=shorter[2],
                stop_reason=StopReason.STOP,
            )
    raise AgentError(
        f"execute returned the action range [{start}, {end}), whose tokens the engine did not say after the {start} tokens "
        "before it: give the ids of llm_engine.generate as they are, behind those it was asked with"
    )


def _check_logprobs(logprobs: Any, spoken: Generation, start: int) -> None:
    """Those that came back are not used, but must be the engine's: else something is mixed up."""
    if logprobs is None:
        return
    if not isinstance(logprobs, list) or len(logprobs) < start + len(spoken.token_ids):
        raise AgentError(
            f"execute returned rollout_log_probs of {shown(logprobs)}: one number a token of observation_tokens is wanted"
        )
    theirs = np.array(logprobs[start : start + len(spoken.token_ids)], dtype=np.float64)
    wrong = ~(np.abs(theirs - np.array(spoken.logprobs)) <= LOGPROB_TOLERANCE)
    if wrong.any():
        place = int(np.argmax(wrong))
        raise AgentError(
            f"execute returned rollout_log_probs[{start + place}]={theirs[place]}, where the engine said "
            f"{spoken.logprobs[place]}: give them as they are, 0 outside of actions, or leave them out"
        )
