"""A real vLLM engine on CPU that sleeps. It keeps its memory there: what it is asked and what it says is as on a GPU."""

import numpy as np
import pytest
from engine_rig import draw_weights, generate, prompt_of, request

from rlhf_core.errors import WorkerError
from rlhf_core.generation.sleeping import NO_WEIGHTS

pytestmark = pytest.mark.pipeline


async def test_an_engine_sleeps_takes_new_weights_and_wakes_without_the_old_prefix(engine_rig):
    rig, engine = engine_rig, engine_rig.engine
    version, prompt = engine.version, prompt_of(96)
    await generate(rig, [request(prompt)])  # leaves its prefix in the cache

    await engine.sleep()
    assert await engine.client.is_sleeping()
    assert engine.version == NO_WEIGHTS
    draw_weights(rig.model, seed=11)
    await engine.update_weights(rig.sender.send(version + 1))
    assert engine.version == version + 1
    with pytest.raises(WorkerError, match="asleep"):
        await engine.generate(request(prompt))
    await engine.wake_up()
    assert not await engine.client.is_sleeping()
    generation = await engine.generate(request(prompt))

    expected = rig.logprobs(prompt, generation.token_ids)
    assert np.abs(expected - generation.logprobs).max() < 1e-4  # an old prefix is off by nats
    assert {span.version for span in generation.version_spans} == {version + 1}


async def test_an_engine_that_slept_goes_on_as_before_once_it_has_weights(engine_rig):
    rig, engine = engine_rig, engine_rig.engine
    version, requests = engine.version, [request(prompt_of(40, seed), seed) for seed in range(4)]
    before = await generate(rig, requests)

    await engine.sleep()
    await engine.wake_up()
    with pytest.raises(WorkerError, match="weights went in its sleep"):
        await engine.generate(requests[0])
    await engine.update_weights(rig.sender.send(version + 1))
    after = await generate(rig, requests)

    assert [g.token_ids for g in after] == [g.token_ids for g in before]
    assert [g.logprobs for g in after] == [g.logprobs for g in before]
