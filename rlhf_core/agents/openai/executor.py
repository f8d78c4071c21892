"""Agents that speak to the policy through an OpenAI client: a function, a program, or a service on the network.

::

    Episode ──open_session──▶ AgentRunner ──calls──▶ OpenAI-compatible server ──▶ engine
                                  │ answer                    │ close_session (in any case)
                                  └────────▶ reward ◀── SessionRecord ──export──▶ Trajectory (one a segment)

The reward is what the agent answered, else what was posted to the session, else None: then the ``reward`` section scores the
last answer. An agent that fails, hangs or makes no call is a failed sample with its reason, whatever it said before.

The episode's stop reason is its last segment's: ``length``, ``context_full`` or ``max_turns`` where the newest call hit that
limit (cut off by it, or refused), else ``done``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_core.agents.executor import AgentExecutorBase
from rlhf_core.agents.multi_turn.executor import METRIC
from rlhf_core.agents.openai.task import AgentTask
from rlhf_core.agents.segment import Segment
from rlhf_core.agents.sessions.export import export_segments, finished_calls
from rlhf_core.errors import AgentDeadlineError, AgentError, ConfigError, DeadlineError
from rlhf_core.records import RewardStatus, SessionRequest, StopReason, Trajectory

if TYPE_CHECKING:
    from rlhf_core.agents.episode import Episode
    from rlhf_core.agents.openai.answer import AgentAnswer
    from rlhf_core.agents.openai.task import AgentRunner
    from rlhf_core.agents.sessions.export import SessionRow
    from rlhf_core.records import AgentServer, Session, SessionRecord

CLOSE_SECONDS = 90.0  # an engine that lives needs less, however busy it is; the router's own limit says more


@dataclass(frozen=True, slots=True)
class OpenAIAgentLimits:
    """What bounds an agent, besides the tokens of its episode."""

    seconds: float  # of one episode
    max_calls: int
    max_parallel: int  # episodes at once


class OpenAIAgentExecutor(AgentExecutorBase):
    """Opens a session for each episode, lets the agent play, and keeps what the engine saw and said."""

    def __init__(self, runner: AgentRunner, limits: OpenAIAgentLimits, *, train_constrained: bool = False) -> None:
        self._runner = runner
        self._limits = limits
        self._train_constrained = train_constrained
        self._turns = asyncio.Semaphore(limits.max_parallel)

    async def execute(self, episode: Episode) -> list[Trajectory]:
        """See the base class."""
        if episode.server is None:
            raise ConfigError(
                "an agent with an OpenAI client needs the server in front of the engines: none was started"
            )
        async with self._turns:
            started = time.monotonic()
            session = await episode.server.open_session(self._request(episode))
            try:
                answer = await self._play(AgentTask.of(episode, session), episode.server)
            finally:
                # Also where the agent failed because its engine died: then this says so, and the sample is asked again.
                record = await _close(episode.server, session)
            seconds = time.monotonic() - started
        segments = export_segments(record, train_constrained=self._train_constrained)
        _check(record, segments)
        return _trajectories(episode, record, segments, answer, seconds)

    async def close(self) -> None:
        """End what the runner holds."""
        await self._runner.close()

    def _request(self, episode: Episode) -> SessionRequest:
        budget = episode.sampling.max_tokens
        each = budget if episode.limits is None else min(budget, episode.limits.max_turn_tokens)
        return SessionRequest(
            session_id=episode.request_id,
            sampling=replace(episode.sampling, max_tokens=each),
            max_tokens=budget,
            max_len=episode.max_len,
            max_calls=self._limits.max_calls,
            affinity=episode.group_id,
        )

    async def _play(self, task: AgentTask, server: AgentServer) -> AgentAnswer:
        """The agent's answer.

        Raises:
            AgentError: it failed. AgentDeadlineError: it did not end in time.
        """
        deadline = time.monotonic() + self._limits.seconds
        answer = await self._runner.run(task, self._limits.seconds)
        if answer.posted_later:
            left = max(0.0, deadline - time.monotonic())
            if not await server.reward_posted(task.session.session_id, left):
                raise AgentDeadlineError(
                    f"no reward was posted to the session within {self._limits.seconds:.3g} s (agent.episode_timeout): an "
                    'agent that answers 202 ends its episode by posting {"reward": ..., "done": true}'
                )
        return answer


async def _close(server: AgentServer, session: Session) -> SessionRecord:
    limit = asyncio.timeout(CLOSE_SECONDS)
    try:
        async with limit:
            return await server.close_session(session.session_id)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(f"session {session.session_id} was not closed within {CLOSE_SECONDS:g} s") from error


def _check(record: SessionRecord, segments: list[SessionRow]) -> None:
    """An episode without an action of the policy must not become a training row."""
    if segments:
        return
    answered = sum(call.stop_reason is not StopReason.ERROR for call in record.calls)
    failed = [call.error for call in record.calls if call.stop_reason is StopReason.ERROR]
    other = f"; {record.refused_calls} were refused" if record.refused_calls else ""
    other += f"; {len(failed)} failed: {failed[0]}" if failed else ""
    if not answered:
        raise AgentError(
            f"the agent made no call that was answered{other}: what it returned says nothing of the policy"
        )
    raise AgentError(
        f"none of the agent's {answered} answers can be trained on{other}: it gave them up, or a grammar, a forced tool or a "
        "bias chose their tokens too (agent.server.train_constrained=true keeps those)"
    )


def _trajectories(
    episode: Episode, record: SessionRecord, segments: list[SessionRow], answer: AgentAnswer, seconds: float
) -> list[Trajectory]:
    reward = record.reward if answer.reward is None else answer.reward
    score = record.score if answer.score is None else answer.score
    told = {**record.metrics, **answer.metrics}
    metrics = {f"{METRIC}{name}": value for name, value in {**told, **_metrics(record, segments, seconds)}.items()}
    rows = [_trajectory(episode, segment, index) for index, segment in enumerate(segments)]
    rows[-1] = replace(rows[-1], stop_reason=_stop_reason(record), metrics=metrics)
    if reward is None:
        return rows
    return [replace(row, reward=reward, score=score, reward_status=RewardStatus.OK) for row in rows]


def _trajectory(episode: Episode, row: SessionRow, index: int) -> Trajectory:
    start, end = row.action_ranges[-1]
    answer = episode.tokenizer.decode(list(row.token_ids[start:end]), skip_special_tokens=True)
    segment = Segment.of(row.token_ids, row.images, row.action_ranges, row.logprobs, row.version_spans)
    transcript = segment.transcript(episode.tokenizer)
    return segment.trajectory(episode, row.stop_reason, segment_index=index, answer=answer, transcript=transcript)


def _stop_reason(record: SessionRecord) -> StopReason:
    if record.limit is not None:
        return record.limit
    newest = finished_calls(record)[-1].stop_reason
    return newest if newest.truncated else StopReason.DONE


def _metrics(record: SessionRecord, segments: list[SessionRow], seconds: float) -> dict[str, float]:
    return {
        "calls": float(len({call.call for call in record.calls})),
        "refused_calls": float(record.refused_calls),
        "constrained_answers": float(sum(call.constrained for call in record.calls)),
        "segments": float(len(segments)),
        "seconds": seconds,
        "engine_seconds": sum(call.seconds for call in record.calls if call.choice == 0),
    }
