"""The scheduler that keeps KV caches over a weight update: vLLM's own classes, without a model."""

import pytest
import torch

BLOCK = 32
PROMPT = list(range(100, 200))  # three blocks, and the beginning of a fourth


class Played:
    """The scheduler, and a model that always says 7."""

    def __init__(self, config):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from rlhf_core.generation.kept_kv import kv_keeping_scheduler

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = kv_keeping_scheduler(
            config,
            kv_cache_config=KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )

    def add(self, name, prompt=PROMPT, max_tokens=200):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, times=1):
        """Tokens that the last of the steps computed of each request."""
        from vllm.v1.outputs import ModelRunnerOutput

        for _ in range(times):
            planned = self.scheduler.schedule()
            names = list(planned.num_scheduled_tokens)
            said = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
            places = {name: index for index, name in enumerate(names)}
            self.scheduler.update_from_output(planned, ModelRunnerOutput(names, places, said))
        return dict(planned.num_scheduled_tokens)

    def new_weights(self):
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def cached_tokens(self, tokens):
        """Of a prompt, before it is computed."""
        request = self.add("probe", tokens)
        found = self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        self.scheduler.finish_requests("probe", request.status.FINISHED_ABORTED)
        return found


@pytest.fixture(scope="module")
def config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    sizes = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 8, "block_size": BLOCK}
    config = EngineArgs(
        str(tiny_model), enforce_eager=True, enable_chunked_prefill=True, **sizes
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 64
    return config


@pytest.fixture
def played(config):
    return Played(config)


def test_a_request_that_has_spoken_goes_on_where_it_was(played):
    request = played.add("a")
    played.step(5)

    played.new_weights()

    assert request.num_preemptions == 0
    assert played.step() == {"a": 1}


def test_old_blocks_and_those_that_attend_to_them_are_never_found(played):
    played.add("group-0", max_tokens=60)
    played.add("group-1", max_tokens=100)
    played.step(40)
    before = [*PROMPT, *[7] * 100, 8]
    assert played.cached_tokens(before) == 128

    played.new_weights()
    assert played.cached_tokens(before) == 0
    played.step(40)  # one ends, and would leave its blocks to others
    assert played.cached_tokens(before) == 0
    played.add("late", max_tokens=40)  # with the new weights, up to where the others were when they came
    played.step(40)

    assert not played.scheduler.running
    assert played.cached_tokens(before) == 128  # of "late", and none behind it


def test_a_second_update_keeps_them_apart_as_well(played):
    played.add("a")
    played.step(40)
    played.new_weights()
    played.step(40)

    played.new_weights()
    played.add("b", max_tokens=70)
    played.step(80)

    assert played.cached_tokens([*PROMPT, *[7] * 150]) == 160  # of "b"


def test_what_vllm_itself_preempts_comes_to_its_end(played):
    """Too many for the blocks there are: some are begun again, and may find what they left."""
    requests = [played.add(str(index), [index, *PROMPT], max_tokens=300) for index in range(8)]
    played.step(100)
    played.new_weights()

    while played.scheduler.running:
        played.step()

    assert [request.num_output_tokens for request in requests] == [300] * 8
    assert sum(request.num_preemptions for request in requests) > 0
    assert [played.cached_tokens([index, *PROMPT, *[7] * 300]) for index in range(8)] == [0] * 8


def test_a_short_request_is_kept_apart_before_its_first_block_is_full(played):
    played.add("a", [1, 2, 3])
    played.step(4)

    played.new_weights()
    played.step(60)

    assert played.cached_tokens([1, 2, 3, *[7] * 60]) == 0


def test_a_prompt_that_is_being_read_begins_anew(played):
    """What was read of it belongs to the old weights; the one before it in the queue goes on."""
    speaking, reading, next_ = played.add("speaking"), played.add("reading", range(400)), played.add("next", range(9))
    played.step()
    assert (speaking.num_output_tokens, reading.num_output_tokens, reading.num_computed_tokens) == (1, 0, 156)

    played.new_weights()

    assert (reading.num_computed_tokens, reading.num_preemptions, speaking.num_preemptions) == (0, 1, 0)
    assert played.step() == {"speaking": 1, "reading": 255}
    assert played.step() == {"speaking": 1, "reading": 145, "next": 9}
    assert next_.num_output_tokens == 1


def test_with_nothing_in_flight_it_is_vllms_own_reset(played):
    played.add("a", max_tokens=2)
    played.step(2)
    assert played.cached_tokens(PROMPT) == 96

    played.new_weights()

    assert played.cached_tokens(PROMPT) == 0


def test_an_engine_that_schedules_ahead_keeps_doing_so(config):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    in_step = Played(config).scheduler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.scheduler_config, "async_scheduling", True)
        ahead = Played(config).scheduler

    assert isinstance(ahead, AsyncScheduler)
    assert not isinstance(in_step, AsyncScheduler)
    assert type(ahead).reset_prefix_cache is type(in_step).reset_prefix_cache
