"""A group that outlives its iteration, on a real engine: gone on with over a weight sync, or ended and forgotten by the engine.

::

    draw v, wanted 0 ─▶ returns at once ─▶ 3 tokens ─▶ weights of v + 1 ─▶ draw v + 1, which names the group ─▶ its rows
"""

import asyncio
import uuid
from types import SimpleNamespace

import pytest
from engine_rig import halt_at, halted

from rlhf_core.agents import SingleTurnAgentExecutor
from rlhf_core.agents.loading import Agent
from rlhf_core.cluster.rollout_worker import RolloutWorker
from rlhf_core.config import parse_config
from rlhf_core.data.order import PromptOrder
from rlhf_core.records import Draw, OpenGroup, Prompt, PromptCursor
from rlhf_core.storage import RunStore

pytestmark = pytest.mark.pipeline

GROUP, OTHER = PromptCursor(0, 0).group_id, PromptCursor(0, 1).group_id
SAMPLES, TOKENS = 2, 24


class InThisProcess:
    """An engine as an actor's handle offers it."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return SimpleNamespace(remote=object.__getattribute__(self, f"_{name}"))

    async def _generate_stream(self, requests):
        async for chunk in self._engine.generate_many(requests):
            yield _ready(chunk)

    async def _version(self):
        return self._engine.version

    async def _abort_requests(self, request_ids):
        await self._engine.abort_requests(request_ids)

    async def _drop_requests(self):
        await self._engine.drop_requests()


async def _ready(chunk):
    return chunk


@pytest.fixture
async def worker(engine_rig):
    root = f"memory://{uuid.uuid4().hex}"
    config = parse_config(
        {"actor": {"model_name_or_path": "builtin:tiny"}, "reward": {"functions": [{"use": "digits"}]}},
        (
            *("data.prompt_dataset=p.jsonl", f"storage.root={root}", "rollout.ignore_eos=true"),
            *(f"rollout.n_samples_per_prompt={SAMPLES}", f"rollout.max_new_tokens={TOKENS}"),
        ),
    )
    context = SimpleNamespace(run_id="run", config=config, store=RunStore("run", root), enter=lambda worker: None)
    worker = RolloutWorker(context)
    worker._agent = Agent(SingleTurnAgentExecutor(), "one turn")
    worker._tokenizer, worker._images, worker._end_ids = engine_rig.tokenizer, None, frozenset()
    worker._prompts = [Prompt(f"row-{i}", "sums", "1 + 1 =", [40, 41, 42 + i]) for i in range(2)]
    worker._order = PromptOrder([2], seed=0)
    yield worker
    await worker.shutdown()


def draw(version, prompts=0, **fields):
    return Draw(version, version - 1, PromptCursor(0, fields.pop("cursor", 0)), prompts, **fields)


async def test_a_group_goes_on_over_a_weight_sync_and_its_spans_say_where(engine_rig, worker):
    engine, version = InThisProcess(engine_rig.engine), engine_rig.engine.version
    halt_at(engine_rig.engine, 3)

    first = await worker.rollout(draw(version, prompts=1, wanted=0), [engine])
    await halted(engine_rig.engine)
    await engine_rig.new_weights(seed=11)
    second = await worker.rollout(draw(version + 1, cursor=1, unfinished=first.unfinished, wanted=1), [engine])

    assert (first.parts, first.unfinished) == ((), (OpenGroup(GROUP, version),))
    rows = worker._store.read_trajectories(second.parts)
    assert [row.iteration for row in rows] == [version + 1] * SAMPLES
    assert [row.version_spans for row in rows] == [((3, 6, version), (6, 3 + TOKENS, version + 1))] * SAMPLES
    assert (second.oldest_versions, second.tally.sampled_tokens) == ({GROUP: version}, SAMPLES * TOKENS)


async def test_the_engine_forgets_a_group_that_nobody_wants_any_more(engine_rig, worker):
    """While it pauses, in the midst of an answer; and the other group goes on."""
    engine, version = InThisProcess(engine_rig.engine), engine_rig.engine.version
    halt_at(engine_rig.engine, 3)
    await worker.rollout(draw(version, prompts=2, wanted=0), [engine])
    await halted(engine_rig.engine)
    in_flight = engine_rig.engine.client.output_processor.request_states
    assert len(in_flight) == 2 * SAMPLES

    await worker._in_play.end([GROUP])
    async with asyncio.timeout(10):
        while len(in_flight) > SAMPLES:
            await asyncio.sleep(0.01)
    await engine_rig.sync()
    outcome = await worker.rollout(draw(version + 1, cursor=2, unfinished=(OpenGroup(OTHER, version),)), [engine])

    assert outcome.places.keys() == {OTHER}
    assert not in_flight
