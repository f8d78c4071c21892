"""A run on its GPUs: who shares one, in which phase it is fullest, and what to change."""

from dataclasses import replace

import pytest
from minimal_config import config

from rlhf_core.config import parse_supervised_config
from rlhf_core.planning.disk import disk_of
from rlhf_core.planning.fit import Machines, footprint
from rlhf_core.planning.memory import ENGINE_PROCESS, GIB, RANK_PROCESS, Training
from rlhf_core.planning.remedies import excess, remedies
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.speed import GPUS, Speed, iteration_time

LLAMA = ModelShape(
    name="8B",
    parameters=8_030_261_248,
    active=8_030_261_248,
    embedding=525_336_576,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    vocabulary=128_256,
    largest=525_336_576,
    linear=((4096, 4096), (4096, 1024)),
    matrices=6_979_321_856,
)
NODE = Machines(nodes=1, gpus=8, gpu_bytes=80 * GIB, node_bytes=None)
TOGETHER = [(1, frozenset({"engine", "policy"}))] * 8
COLOCATED = [
    "actor.num_gpus_per_node=8",
    "vllm.num_engines=8",
    "vllm.gpu_memory_utilization=0.6",
    "train.colocate_all=true",
    "data.max_len=8192",
]
CHECKPOINTED = ["actor.gradient_checkpointing_enable=true", "train.micro_batch_size=1"]
SLEEPING = ["vllm.enable_sleep=true", "ds.enable_sleep=true"]


def of(checked, slots=TOGETHER, machines=NODE, device="gpu", shapes=None):
    return footprint(checked, shapes or {"policy": LLAMA}, slots, device, machines)


def test_on_a_gpu_that_is_shared_the_others_rest():
    awake = of(config(*COLOCATED, *CHECKPOINTED)).places[0]
    asleep = of(config(*COLOCATED, *CHECKPOINTED, *SLEEPING)).places[0]

    engine = 0.6 * 80 * GIB
    assert awake.count == 8
    assert set(awake.phases) == {"generation", "update", "weight sync"}
    assert asleep.phases["generation"] == pytest.approx(engine + RANK_PROCESS["gpu"])
    assert awake.phases["update"] - asleep.phases["update"] == pytest.approx(engine - ENGINE_PROCESS["gpu"])
    assert awake.peak > 80 * GIB > asleep.peak


def test_what_sleeps_waits_in_host_memory():
    [host] = [place for place in of(config(*COLOCATED, *CHECKPOINTED, *SLEEPING)).places if place.name == "node"]
    [awake] = [place for place in of(config(*COLOCATED, *CHECKPOINTED)).places if place.name == "node"]

    weights = 2 * LLAMA.parameters
    states = weights + 4 * LLAMA.parameters / 8 + 12 * LLAMA.parameters / 8 + 4 * 50_000_000
    assert host.peak - awake.peak == pytest.approx(8 * (weights + states))


def test_kinds_of_gpus_apart():
    slots = [(2, frozenset({"engine"}))] + [(1, frozenset({"policy"}))] * 4
    apart = ["actor.num_gpus_per_node=4", "vllm.tensor_parallel_size=2", "data.max_len=2048"]

    found = of(config(*apart), slots)

    assert [(place.count, place.roles) for place in found.places[:2]] == [(2, ("engine",)), (4, ("policy",))]
    assert found.needs["engine"].parts[0].bytes == LLAMA.parameters  # half of the weights, in bf16


def test_remedies_are_tried_and_the_last_one_fits():
    checked = config(*COLOCATED)
    now = of(checked)

    found = remedies(checked, now, of)

    assert not now.fits
    assert [remedy.fits for remedy in found[:-1]] == [False] * (len(found) - 1)
    assert found[-1].fits
    again = of(config(*COLOCATED, *found[-1].overrides))
    assert (again.fits, excess(again)) == (True, 0)


def test_the_mildest_change_that_is_enough_is_named():
    checked = config(*COLOCATED, "actor.gradient_checkpointing_enable=true", "train.micro_batch_size=16", *SLEEPING)
    found = remedies(checked, of(checked), of)

    [rows] = [remedy for remedy in found if remedy.overrides[0].startswith("train.micro_batch_size=")]
    assert rows.fits
    doubled = 2 * int(rows.overrides[0].partition("=")[2])
    assert not of(
        config(*COLOCATED, "actor.gradient_checkpointing_enable=true", *SLEEPING, f"train.micro_batch_size={doubled}")
    ).fits


def test_a_cache_too_small_for_one_sequence_is_a_problem():
    found = of(config(*COLOCATED, *CHECKPOINTED, *SLEEPING, "vllm.gpu_memory_utilization=0.24"))

    assert not found.fits
    assert found.sequences == 0
    assert "one sequence of 8192 tokens needs 1.00 GiB" in found.problems[0]


def test_on_cpu_everything_is_in_the_memory_of_the_node():
    small = replace(
        LLAMA, parameters=1_000_000, active=1_000_000, vocabulary=320, layers=2, hidden=64, intermediate=128, heads=2
    )
    machine = Machines(1, 0, 0.0, 8 * GIB)
    slots = [(0, frozenset({"engine"})), (0, frozenset({"policy"}))]

    found = of(
        config("train.micro_batch_size=1", "rollout.micro_batch_size=1"), slots, machine, "cpu", {"policy": small}
    )

    [node] = found.places
    assert node.peak > sum(need.bytes for role, need in found.needs.items())
    assert node.fits
    assert not of(config(), slots, replace(machine, node_bytes=3 * GIB), "cpu", {"policy": small}).fits


def test_preferences_have_two_rows_and_dpo_a_reference():
    base = {"model": {"model_name_or_path": "m"}, "data": {"dataset": "p.jsonl"}}
    checked = parse_supervised_config(base, ["model.gradient_checkpointing_enable=true", "model.num_gpus_per_node=8"])
    slots, shapes = [(1, frozenset({"model"}))], {"policy": LLAMA, "reference": LLAMA}

    sft = footprint(checked, shapes, slots, "gpu", NODE, "sft").needs["model"]
    dpo = footprint(checked, shapes, slots, "gpu", NODE, "dpo").needs["model"]

    working = {need: next(p.bytes for p in need.parts if p.name.startswith("activations")) for need in (sft, dpo)}
    assert working[dpo] > 1.9 * working[sft]
    assert dpo.parts[-1].bytes == 2 * LLAMA.parameters


def test_storage_of_an_iteration_and_of_checkpoints():
    checked = config(
        "train.max_iterations=10", "ckpt.save_steps=4", "rollout.batch_size=2", "rollout.n_samples_per_prompt=4"
    )
    how = Training(1, 2, "bf16", tokens=1, longest=1, chunk=1)

    disk = disk_of(checked, LLAMA, None, how)

    assert disk.checkpoint == 16 * LLAMA.parameters  # bf16 twice, and 12 bytes of the optimizer
    assert disk.checkpoints == 3
    assert disk.total == 10 * disk.iteration + 3 * disk.checkpoint


def test_time_of_an_iteration_by_hand():
    """2 samples of 100 + 28 tokens, on a device of 1e15 operations a second at 50 %."""
    speed = Speed("a device", 1e15, 1e12)
    checked = config(
        "rollout.batch_size=1", "rollout.n_samples_per_prompt=2", "data.max_len=128", "rollout.max_new_tokens=28"
    )

    time = iteration_time(checked, {"policy": LLAMA}, speed, 0.5)

    weight = 8_030_261_248 - 525_336_576 + 32 * 32 * 128 * 128
    assert time.update == pytest.approx(2 * 128 * 6 * weight / 0.5e15)
    assert time.score == 0  # the update's own log-probs serve
    read = (2 * 8_030_261_248 + 2 * 2 * 2 * 32 * 8 * 128 * (100 + 14)) / 0.6e12
    assert time.generate == pytest.approx(28 * read + 2 * 100 * 2 * 8_030_261_248 / 0.25e15)
    assert time.seconds == time.generate + time.update


def test_overlapping_iterations_take_the_longer_of_both():
    time = iteration_time(config("train.async_enable=true"), {"policy": LLAMA}, GPUS["H100"], 0.4)

    assert time.seconds == max(time.generate, time.score + time.update)
