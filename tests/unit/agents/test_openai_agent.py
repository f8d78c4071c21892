"""Episodes of agents with an OpenAI client, over a server and agents that follow a script.

The session of most tests: the agent calls twice, and the second call goes on from the first, token by token::

    call 0   11 12 13 | 40 41          call 1   11 12 13 40 41 50 | 42 2
"""

import asyncio

import pytest
from agent_script import Scripted, episode, numbers

from rlhf_core.agents import run_episode
from rlhf_core.agents.episode import TurnLimits
from rlhf_core.agents.openai.answer import AgentAnswer
from rlhf_core.agents.openai.executor import OpenAIAgentExecutor, OpenAIAgentLimits
from rlhf_core.agents.openai.task import said_by_the_user
from rlhf_core.errors import AgentError, DeadlineError, WorkerError
from rlhf_core.records import (
    ActionRange,
    CallRecord,
    ImageRef,
    Prompt,
    RewardStatus,
    Session,
    SessionRecord,
    StopReason,
    VersionSpan,
)

pytestmark = pytest.mark.agents


def call(number, prompt, answer, stop=StopReason.EOS, **changes):
    fields = {
        "call": number,
        "choice": 0,
        "prompt_token_ids": tuple(prompt),
        "token_ids": tuple(answer),
        "logprobs": tuple(-0.1 * (i + 1) for i in range(len(answer))),
        "version_spans": (VersionSpan(0, len(answer), 7),) if answer else (),
        "stop_reason": stop,
        "text": "said",
        "seconds": 0.5,
    }
    return CallRecord(**(fields | changes))


FIRST = call(0, [11, 12, 13], [40, 41])
SECOND = call(1, [11, 12, 13, 40, 41, 50], [42, 2], continued=True)
ELSEWHERE = call(1, [11, 60], [43, 2])


ONE = AgentAnswer(1.0)


class Server:
    """A server whose sessions all become one record."""

    def __init__(self, calls=(FIRST, SECOND), dies=False, posted=False, **record):
        self.calls, self.record, self.dies, self.posted = tuple(calls), record, dies, posted
        self.requests, self.closed, self.waited = [], [], []

    async def open_session(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        return Session(request.session_id, "http://here/v1", f"key of {request.session_id}")

    async def reward_posted(self, session_id, seconds):
        self.waited.append(seconds)
        return self.posted

    async def close_session(self, session_id):
        self.closed.append(session_id)
        if self.dies:
            raise WorkerError("the engine is gone")
        return SessionRecord(session_id, self.calls, **self.record)


class Agent:
    """Answers with what the script makes of its task: an answer, or an error to raise."""

    def __init__(self, script=ONE, seconds=0.0):
        self.script, self.seconds, self.tasks, self.running, self.most = script, seconds, [], 0, 0

    async def run(self, task, seconds):
        self.tasks.append(task)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        if isinstance(self.script, BaseException):
            raise self.script
        return self.script


def executor(agent, parallel=8, **options):
    return OpenAIAgentExecutor(agent, OpenAIAgentLimits(20.0, 5, parallel), **options)


async def play(server, agent=None, **changes):
    return await executor(agent or Agent()).execute(episode(Scripted(), server=server, **changes))


async def test_what_the_engine_saw_and_said_becomes_the_row():
    [row] = await play(Server())

    assert row.token_ids.tolist() == [11, 12, 13, 40, 41, 50, 42, 2]
    assert row.action_ranges == (ActionRange(3, 5), ActionRange(6, 8))
    assert numbers(row.rollout_logprobs) == [0, 0, 0, -0.1, -0.2, 0, -0.1, -0.2]
    assert row.version_spans == (VersionSpan(3, 5, 7), VersionSpan(6, 8, 7))
    assert (row.reward, row.reward_status, row.stop_reason) == (1.0, RewardStatus.OK, StopReason.DONE)
    assert (row.answer, row.prompt, row.label) == ("*", "1 + 1 =", 2)
    assert row.transcript == "()2*\x02"  # both calls and what lies between: what reward functions read as the query


async def test_a_broken_prefix_gives_two_rows_with_one_reward():
    rows = await play(Server([FIRST, ELSEWHERE]))

    assert [row.key for row in rows] == [("g0", 0, 0), ("g0", 0, 1)]
    assert [row.token_ids.tolist() for row in rows] == [[11, 12, 13, 40, 41], [11, 60, 43, 2]]
    assert [row.reward for row in rows] == [1.0, 1.0]
    assert [row.answer for row in rows] == ["()", "+"]
    assert [row.metrics.get("agent/segments") for row in rows] == [None, 2.0]


async def test_the_session_has_the_budgets_of_the_run():
    server = Server()

    await play(server, limits=TurnLimits(max_turns=3, max_turn_tokens=5))

    [request] = server.requests
    assert (request.session_id, request.affinity) == ("3-0-g0-0", "g0")
    assert (request.max_tokens, request.sampling.max_tokens, request.max_len, request.max_calls) == (8, 5, 32, 5)


async def test_the_agent_is_told_the_prompt_and_its_session():
    agent = Agent()
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1 + 1"}]}]
    prompt = Prompt("row", "sums", "<user>1 + 1<end>", [11, 12, 13], label=2, messages=said)

    await play(Server(), agent, prompt=prompt)

    [task] = agent.tasks
    assert (task.prompt, task.label, task.messages, task.seed) == ("1 + 1", 2, said, 100)
    assert task.session.api_key == "key of 3-0-g0-0"


async def test_images_of_a_prompt_are_refused_by_name():
    image = ImageRef("ab" * 32, "images/ab.png", 1, 3)
    prompt = Prompt("row-7", "shapes", "What is it?", [11, 12, 13], images=(image,))

    with pytest.raises(AgentError, match="prompt row-7 shows images"):
        await play(Server(), prompt=prompt)


def test_a_prompt_of_plain_text_is_one_user_message():
    prompt = Prompt("row", "sums", "Q: 1 + 1\nA:", [1])

    assert said_by_the_user(prompt) == ("Q: 1 + 1\nA:", [{"role": "user", "content": "Q: 1 + 1\nA:"}])


@pytest.mark.parametrize(
    ("answer", "posted", "reward", "score"),
    [
        (AgentAnswer(1.0, 0.5), {"reward": 3.0, "score": 4.0}, 1.0, 0.5),
        (AgentAnswer(), {"reward": 3.0, "score": 4.0}, 3.0, 4.0),
        (AgentAnswer(0.0), {"reward": 3.0}, 0.0, None),
        (AgentAnswer(), {}, None, None),
    ],
)
async def test_the_answer_counts_before_what_was_posted(answer, posted, reward, score):
    [row] = await play(Server(**posted), Agent(answer))

    assert (row.reward, row.score) == (reward, score)
    assert row.reward_status is (RewardStatus.PENDING if reward is None else RewardStatus.OK)


async def test_metrics_of_agent_and_session():
    server = Server(metrics={"posted": 1.0, "both": 1.0}, refused_calls=2)

    [row] = await play(server, Agent(AgentAnswer(1.0, None, {"both": 2.0})))

    assert {name: value for name, value in row.metrics.items() if name != "agent/seconds"} == {
        "agent/posted": 1.0,
        "agent/both": 2.0,
        "agent/calls": 2.0,
        "agent/refused_calls": 2.0,
        "agent/constrained_answers": 0.0,
        "agent/segments": 1.0,
        "agent/engine_seconds": 1.0,
    }


@pytest.mark.parametrize(
    ("calls", "limit", "reason"),
    [
        ([FIRST, SECOND], None, StopReason.DONE),
        ([call(0, [11], [40], StopReason.LENGTH), SECOND], None, StopReason.DONE),
        ([FIRST, call(1, [11, 60], [43], StopReason.LENGTH)], None, StopReason.LENGTH),
        ([FIRST, call(1, [11, 60], [43], StopReason.CONTEXT_FULL)], None, StopReason.CONTEXT_FULL),
        ([FIRST, SECOND], StopReason.LENGTH, StopReason.LENGTH),
        ([FIRST, SECOND], StopReason.CONTEXT_FULL, StopReason.CONTEXT_FULL),
        ([FIRST, SECOND], StopReason.MAX_TURNS, StopReason.MAX_TURNS),
        ([call(0, [11], [40], StopReason.LENGTH), call(1, [12], [], StopReason.ABORTED)], None, StopReason.LENGTH),
    ],
)
async def test_stop_reasons(calls, limit, reason):
    rows = await play(Server(calls, limit=limit))

    assert rows[-1].stop_reason is reason


@pytest.mark.parametrize("error", [AgentError("crashed"), DeadlineError("too slow"), asyncio.CancelledError()])
async def test_the_session_is_closed_however_the_agent_ends(error):
    server = Server()

    with pytest.raises(type(error)):
        await play(server, Agent(error))

    assert server.closed == ["3-0-g0-0"]


async def test_a_failed_agent_is_a_failed_sample_with_its_reason():
    played = episode(Scripted(), server=Server())

    [row] = await run_episode(executor(Agent(AgentError("it crashed"))), played)

    assert (row.failed, row.error, row.reward) == (True, "AgentError: it crashed", None)


@pytest.mark.parametrize("outcome", [AgentAnswer(1.0), AgentError("its calls failed")])
async def test_an_engine_that_died_is_no_fault_of_the_sample(outcome):
    with pytest.raises(WorkerError, match="the engine is gone"):
        await run_episode(executor(Agent(outcome)), episode(Scripted(), server=Server(dies=True)))


@pytest.mark.parametrize(
    ("calls", "record", "message"),
    [
        ([], {}, "the agent made no call that was answered: what it returned says nothing"),
        ([], {"refused_calls": 3}, "no call that was answered; 3 were refused"),
        ([call(0, [11], [], StopReason.ERROR, error="out of blocks")], {}, "1 failed: out of blocks"),
        ([call(0, [11], [40], StopReason.ABORTED)], {}, "none of the agent's 1 answers can be trained on"),
        ([call(0, [11], [40, 2], constrained=True)], {}, "agent.server.train_constrained=true"),
    ],
)
async def test_an_episode_without_an_action_is_an_error(calls, record, message):
    with pytest.raises(AgentError, match=message):
        await play(Server(calls, **record))


async def test_constrained_answers_are_trained_if_asked_for():
    server = Server([call(0, [11], [40, 2], constrained=True)])

    [row] = await executor(Agent(), train_constrained=True).execute(episode(Scripted(), server=server))

    assert row.action_ranges == (ActionRange(1, 3),)


async def test_a_reward_that_is_posted_later_is_waited_for():
    server = Server(posted=True, reward=2.0)

    [row] = await play(server, Agent(AgentAnswer(posted_later=True), seconds=0.1))

    assert row.reward == 2.0
    assert 19 < server.waited[0] < 20


async def test_a_promised_reward_that_never_comes_is_a_failure():
    with pytest.raises(DeadlineError, match=r'no reward was posted to the session within 20 s .*"done": true'):
        await play(Server(), Agent(AgentAnswer(posted_later=True)))


async def test_so_many_agents_run_at_once_as_may():
    agent, server = Agent(seconds=0.02), Server()
    playing = executor(agent, parallel=3)

    await asyncio.gather(*(playing.execute(episode(Scripted(), sample=i, server=server)) for i in range(12)))

    assert (agent.most, len(server.closed)) == (3, 12)


async def test_without_a_server_the_error_says_so():
    with pytest.raises(ValueError, match="none was started"):
        await play(None)
