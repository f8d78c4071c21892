"""Who gets what, before anything starts."""

import pytest
from cluster_samples import config

from rlhf_core.cluster.placement import LIGHT_CPUS, LIGHT_WORKERS, place, resolve_device
from rlhf_core.errors import ConfigError


def total(placement, checked, what):
    """The sum over all processes."""
    shares = [placement.engine] * checked.vllm.num_engines + [placement.policy] * checked.actor.world_size
    if checked.needs_reference:
        shares += [placement.reference] * (checked.ref.num_nodes * checked.ref.num_gpus_per_node)
    shares += [placement.light] * len(LIGHT_WORKERS)
    return sum(getattr(share, what) for share in shares)


@pytest.mark.parametrize(
    ("device", "resources", "resolved"),
    [
        ("auto", {"CPU": 4.0}, "cpu"),
        ("auto", {"CPU": 4.0, "GPU": 1.0}, "gpu"),
        ("cpu", {"CPU": 4.0, "GPU": 1.0}, "cpu"),
        ("gpu", {"CPU": 4.0}, "gpu"),
    ],
)
def test_the_device(device, resources, resolved):
    assert resolve_device(config(f"run.device={device}"), resources) == resolved


@pytest.mark.parametrize("cpus", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("gpus", [0, 16])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["vllm.num_engines=3", "actor.num_gpus_per_node=4"],
        ["vllm.tensor_parallel_size=2", "vllm.num_engines=2", "algo.kl.init_coef=0.1", "ref.num_gpus_per_node=2"],
        ["vllm.num_engines=7", "actor.num_gpus_per_node=8"],
    ],
)
def test_the_shares_fit_into_the_cores(cpus, gpus, overrides):
    """On either device: Ray would wait for ever for a core that is not there."""
    checked = config(*overrides)

    placement = place(checked, {"CPU": cpus, "GPU": gpus})

    assert round(total(placement, checked, "cpus"), 4) <= cpus  # Ray counts in 1/10000
    assert placement.policy.cpus > 0


def test_a_process_never_reserves_more_than_a_core():
    assert place(config(), {"CPU": 64}).engine.cpus == 1.0


def test_gpus_are_counted_per_engine_and_rank():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "actor.num_gpus_per_node=4")

    placement = place(checked, {"CPU": 64, "GPU": 8})

    assert (placement.engine.gpus, placement.policy.gpus, placement.light.gpus) == (2, 1, 0)
    assert total(placement, checked, "gpus") == 8


def test_no_gpu_is_asked_for_on_cpu():
    assert total(place(config("run.device=cpu"), {"CPU": 4, "GPU": 8}), config(), "gpus") == 0


def test_too_few_gpus_are_refused_with_the_sum():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "algo.kl.init_coef=0.1")

    with pytest.raises(ConfigError) as caught:
        place(checked, {"CPU": 64, "GPU": 4})

    message = str(caught.value)
    assert "needs 6 GPUs (vllm.num_engines=2 × vllm.tensor_parallel_size=2 + 2 training ranks)" in message
    assert "the cluster has 4: lower one of them or add nodes" in message


def test_a_gpu_run_without_gpus_is_refused():
    with pytest.raises(ConfigError, match="needs 2 GPUs .* the cluster has 0"):
        place(config("run.device=gpu"), {"CPU": 64})


def test_people_read_one_line_a_group():
    checked = config("algo.kl.init_coef=0.1", "vllm.num_engines=2")

    lines = place(checked, {"CPU": 64}).describe(checked)

    assert [line.split()[0] for line in lines] == ["engine", "policy", "reference", *LIGHT_WORKERS]
    assert lines[0].split() == ["engine", "2", "×", "1", "CPU,", "0", "GPU"]
    assert lines[-1].split()[3] == f"{LIGHT_CPUS:g}"
