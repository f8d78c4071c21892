"""A rollout whose environments are processes, half done when its worker is killed: the next worker plays only what is missing.

::

    one attempt            g0 g1 g2 g3 g4 g5     rows that are trained
    killed, and again      g0 g1 g2 | g3 g4 g5   the same rows
"""

import asyncio
import hashlib
import textwrap
import uuid
from types import SimpleNamespace

import pytest
from cluster_samples import FakeEngine, Method
from minimal_config import config
from ray.exceptions import RayActorError

from rlhf_core.agents.loading import load_agent
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.data.order import PromptOrder
from rlhf_core.data.tiny_model import EOS, _tokenizer
from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import Draw, Generation, Prompt, PromptCursor, StopReason, VersionSpan
from rlhf_core.storage import RunStore

pytestmark = pytest.mark.agents

GAME = """
    import os
    import random

    from rlhf_core.agents import AgentInstanceBase


    class AgentInstance(AgentInstanceBase):
        def __init__(self, crash):
            self.crash, self.secret, self.heard = crash, random.randint(0, 10**6), ""

        def step(self, states):
            if self.crash and states["label"] == 1 and states["turn"] == 1:
                os._exit(9)
            self.heard += states["action_text"]
            return {
                "rewards": len(self.heard) / 8,
                "done": states["turn"] == 2,
                "environment_feedback": {"role": "user", "content": f"{self.secret} {self.heard}"},
            }
"""
PROMPTS, SAMPLES = 6, 2
DRAW = Draw(iteration=0, oldest_version=0, cursor=PromptCursor(), prompts=PROMPTS)


class Engine(FakeEngine):
    """Says what prompt and seed make of it; dies before it has answered more than ``answers`` requests."""

    def __init__(self, answers=10**9):
        super().__init__(self._say)
        self.answered, self._left = [], answers
        self.drop_requests = Method(self._drop)

    async def _drop(self):
        return None

    async def _say(self, requests):
        for index, asked in enumerate(requests):
            if len(self.answered) >= self._left:
                await asyncio.sleep(0.3)  # what is finished is published meanwhile
                raise RayActorError
            self.answered.append(asked.request_id)
            drawn = hashlib.sha256(f"{asked.prompt_token_ids} {asked.sampling.seed}".encode()).digest()
            ids = [65 + byte % 26 for byte in drawn[:3]] + [EOS]
            spans = [VersionSpan(0, len(ids), 0)]
            await asyncio.sleep(0)
            yield [(index, Generation(asked.request_id, ids, [-0.5] * len(ids), spans, StopReason.EOS))]


@pytest.fixture
async def worker(tmp_path):
    """Makes workers of one run, each with processes of its own."""
    (tmp_path / "game.py").write_text(textwrap.dedent(GAME))
    made = []

    async def make(root, crash=False, **rollout):
        checked = config(
            f"storage.root={root}",
            f"train.agent_func_path={tmp_path / 'game.py'}",
            f"agent.args={{crash: {str(crash).lower()}}}",
            "agent.max_processes=2",
            "rollout.publish_groups=1",
            f"rollout.n_samples_per_prompt={SAMPLES}",
            *(f"rollout.{key}={value}" for key, value in rollout.items()),
        )
        context = SimpleNamespace(run_id="run", config=checked, store=RunStore("run", root), enter=lambda worker: None)
        worker = RolloutWorker(context)
        worker._tokenizer, worker._images, worker._end_ids = _tokenizer(), None, frozenset({EOS})
        worker._prompts = [_prompt(worker._tokenizer, i) for i in range(PROMPTS)]
        worker._order = PromptOrder([PROMPTS], seed=3)
        worker._agent = await load_agent(checked, None)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        await worker.shutdown()


def _prompt(tokenizer, index):
    messages = [{"role": "user", "content": f"game {index}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(f"row-{index}", "games", text, tokenizer.encode(text), label=index, messages=messages)


def fresh():
    return f"memory://{uuid.uuid4().hex}"


def told(worker, outcome):
    """What is trained of a rollout, without its times."""
    rows = worker._store.read_trajectories(outcome.parts)
    return sorted(
        (row.key, row.token_ids.tolist(), row.action_ranges, row.step_rewards, row.reward, str(row.stop_reason))
        for row in rows
    )


async def test_the_rows_of_a_killed_rollout_are_those_of_one_that_went_through(worker):
    whole = await worker(fresh())
    expected = told(whole, await whole.rollout(DRAW, [Engine()]))
    root, dying, second = fresh(), Engine(answers=22), Engine()

    first = await worker(root)
    with pytest.raises(WorkerError):
        await first.rollout(DRAW, [dying])
    again = await worker(root)
    outcome = await again.rollout(DRAW, [second])

    assert told(again, outcome) == expected
    assert len(expected) == PROMPTS * SAMPLES
    assert 0 < outcome.resumed_groups < PROMPTS
    assert len(second.answered) == 3 * SAMPLES * (PROMPTS - outcome.resumed_groups)
    assert outcome.tally.samples == PROMPTS * SAMPLES


async def test_a_group_whose_environment_crashed_is_played_again(worker):
    whole = await worker(fresh())
    expected = told(whole, await whole.rollout(DRAW, [Engine()]))
    root, second = fresh(), Engine()

    broken = await worker(root, crash=True)
    lost = await broken.rollout(DRAW, [Engine()])
    mended = await worker(root)
    outcome = await mended.rollout(DRAW, [second])

    assert lost.tally.failed == SAMPLES
    assert (outcome.resumed_groups, len(second.answered)) == (PROMPTS - 1, 3 * SAMPLES)
    assert told(mended, outcome) == expected


async def test_on_error_fail_names_the_crash(worker):
    broken = await worker(fresh(), crash=True, on_error="fail")

    with pytest.raises(RunFailedError, match="exited with code 9"):
        await broken.rollout(DRAW, [Engine()])
