"""Policies and environments of several turns that follow a script, with the tokenizer of the built-in model."""

import asyncio
from functools import cache

from agent_script import episode

from rlhf_core.agents import AgentInstanceBase, MultiTurnAgentExecutor, TurnLimits
from rlhf_core.agents.environment.base import InProcess
from rlhf_core.agents.environment.instance import Instance
from rlhf_core.agents.openrlhf.executor import OpenRlhfExecutor
from rlhf_core.agents.openrlhf.process import ExecutorInstance
from rlhf_core.data.tiny_model import EOS, _tokenizer
from rlhf_core.records import Generation, Prompt, SamplingParams, StopReason, VersionSpan

CLOSE = "<|im_end|>"


@cache
def tokenizer():
    return _tokenizer()


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False)


def chat(*messages):
    """A prompt of chat messages."""
    said = [dict(message) for message in messages]
    options = {"add_generation_prompt": True}
    text = tokenizer().apply_chat_template(said, tokenize=False, **options)
    return Prompt("row", "chat", text, ids(text), label=7, messages=said)


def plain(text="ab"):
    return Prompt("row", "plain", text, [256, *ids(text)], label=7)


def user(text):
    return {"role": "user", "content": text}


class Speaks:
    """A policy that says one text after the other, cut where it may not say more; log-probs -1, -2, ... over all it says."""

    def __init__(self, *texts, version=7, stop=StopReason.STOP):
        self._texts = list(texts)
        self._said = 0
        self._version = version
        self._stop = stop
        self.requests = []

    async def generate(self, request):
        await asyncio.sleep(0)
        self.requests.append(request)
        tokens = ids(self._texts[len(self.requests) - 1])
        kept = tokens[: request.sampling.max_tokens]
        stop = StopReason.EOS if kept[-1] == EOS else self._stop
        stop = stop if len(kept) == len(tokens) else StopReason.LENGTH
        logprobs = [-float(self._said + i) for i in range(1, len(kept) + 1)]
        self._said += len(kept)
        spans = [VersionSpan(0, len(kept), self._version)]
        return Generation(request.request_id, kept, logprobs, spans, stop)


class Answers(AgentInstanceBase):
    """An environment that answers one step after the other, and keeps what it was told."""

    def __init__(self, steps=(), observation=None):
        self._steps = list(steps)
        self._observation = observation
        self.reset_states = None
        self.states = []
        self.closed = 0

    def reset(self, states):
        self.reset_states = states
        return self._observation

    def step(self, states):
        self.states.append(states)
        answer = self._steps[len(self.states) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        self.closed += 1


def goes_on(feedback, **fields):
    return {"environment_feedback": feedback, "done": False, **fields}


def is_done(**fields):
    return {"done": True, **fields}


class Around(Instance):
    """An instance around an agent that exists already."""

    def __init__(self, agent):
        super().__init__(type(agent), {})
        self._given = agent

    def reset(self, payload):
        self._class = lambda: self._given
        return super().reset(payload)


def turns_episode(policy, prompt, *, total=200, turn=100, turns=8, max_len=400, **changes):
    return episode(
        policy,
        prompt=prompt,
        tokenizer=tokenizer(),
        sampling=SamplingParams(max_tokens=total, seed=100),
        max_len=max_len,
        end_ids=frozenset({EOS}),
        limits=TurnLimits(turns, turn),
        **changes,
    )


async def play_turns(policy, agent, prompt=None, **changes):
    """The rows of an episode in which ``policy`` and ``agent`` talk."""
    executor = MultiTurnAgentExecutor(InProcess(lambda seed: Around(agent)))
    return await executor.execute(turns_episode(policy, prompt or chat(user("hi")), **changes))


async def play_executor(policy, executor, prompt=None, args=None, **changes):
    """The rows of an episode that a user's executor plays."""
    source = InProcess(lambda seed: ExecutorInstance(executor, tokenizer(), args or {}))
    return await OpenRlhfExecutor(source).execute(turns_episode(policy, prompt or plain(), **changes))


def actions_of(row):
    return [row.token_ids[start:end].tolist() for start, end in row.action_ranges]
