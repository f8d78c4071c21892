"""Who gets what, before anything starts."""

import pytest
from cluster_samples import config

from rlhf_core.cluster.groups import run_members
from rlhf_core.cluster.placement import (
    LIGHT_CPUS,
    LIGHT_WORKERS,
    model_ranks,
    place,
    place_supervised,
    resolve_device,
)
from rlhf_core.config import parse_supervised_config
from rlhf_core.errors import ConfigError

PPO = ("algo.advantage.estimator=gae",)
SCORED = ("reward.functions=[]", "reward.model_name_or_path=scorer")


def total(placement, checked, what):
    """The sum over all processes of the run."""
    members = run_members(checked, placement, threads=1).values()
    return sum(getattr(member.share, what) * member.count for member in members)


def supervised(*overrides):
    base = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "chats.jsonl"}}
    return parse_supervised_config(base, overrides)


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
    assert resolve_device(config(f"run.device={device}").run, resources) == resolved


@pytest.mark.parametrize("cpus", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("gpus", [0, 16])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["vllm.num_engines=3", "actor.num_gpus_per_node=4"],
        ["vllm.tensor_parallel_size=2", "vllm.num_engines=2", "algo.kl.init_coef=0.1", "ref.num_gpus_per_node=2"],
        ["vllm.num_engines=7", "actor.num_gpus_per_node=8"],
        [*PPO, "critic.num_gpus_per_node=2", *SCORED, "reward.model_num_ranks=3"],
    ],
)
def test_the_shares_fit_into_the_cores(cpus, gpus, overrides):
    """On either device: Ray would wait for ever for a core that is not there."""
    checked = config(*overrides)

    placement = place(checked, {"CPU": cpus, "GPU": gpus})

    assert round(total(placement, checked, "cpus"), 4) <= cpus  # Ray counts in 1/10000
    assert placement.rank.cpus > 0


def test_a_process_never_reserves_more_than_a_core():
    assert place(config(), {"CPU": 64}).engine.cpus == 1.0


def test_gpus_are_counted_per_engine_and_rank():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "actor.num_gpus_per_node=4")

    placement = place(checked, {"CPU": 64, "GPU": 8})

    assert (placement.engine.gpus, placement.rank.gpus, placement.light.gpus) == (2, 1, 0)
    assert total(placement, checked, "gpus") == 8


def test_no_gpu_is_asked_for_on_cpu():
    assert total(place(config("run.device=cpu"), {"CPU": 4, "GPU": 8}), config(), "gpus") == 0


def test_too_few_gpus_are_refused_with_the_sum():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "algo.kl.init_coef=0.1")

    with pytest.raises(ConfigError) as caught:
        place(checked, {"CPU": 64, "GPU": 4})

    message = str(caught.value)
    sum_of = "vllm.num_engines=2 × vllm.tensor_parallel_size=2 + ranks: 1 policy + 1 reference"
    assert f"needs 6 GPUs ({sum_of})" in message
    assert "the cluster has 4: lower one of them or add nodes" in message


def test_a_gpu_run_without_gpus_is_refused():
    with pytest.raises(ConfigError, match="needs 2 GPUs .* the cluster has 0"):
        place(config("run.device=gpu"), {"CPU": 64})


def test_people_read_one_line_a_group():
    checked = config("algo.kl.init_coef=0.1", "vllm.num_engines=2")

    lines = place(checked, {"CPU": 64}).describe(checked)

    assert [line.split()[0] for line in lines] == ["engine", "policy", "reference", *LIGHT_WORKERS]
    assert lines[1].split()[1] == "1"
    assert lines[0].split() == ["engine", "2", "×", "1", "CPU,", "0", "GPU"]
    assert lines[-1].split()[3] == f"{LIGHT_CPUS:g}"


REPLAY = ("replay.source=first", "vllm.num_engines=2")


def test_a_replay_asks_for_training_ranks_only():
    checked = config(*REPLAY, "algo.kl.init_coef=0.1", "run.device=gpu")

    lines = place(checked, {"CPU": 64, "GPU": 2}).describe(checked)

    assert [line.split()[0] for line in lines] == ["policy", "reference", "scoring"]
    with pytest.raises(ConfigError, match=r"needs 2 GPUs \(ranks: 1 policy \+ 1 reference\)"):
        place(checked, {"CPU": 64, "GPU": 1})


@pytest.mark.parametrize(("rewards", "ranks"), [("source", 0), ("anew", 1)])
def test_a_replay_loads_the_reward_model_only_to_score_again(rewards, ranks):
    checked = config(*REPLAY, f"replay.rewards={rewards}", "reward.model_name_or_path=builtin:tiny")

    assert model_ranks(checked)["reward"] == ranks


# --- who there is

NOBODY = {"policy": 1, "critic": 0, "reference": 0, "reward": 0}


@pytest.mark.parametrize(
    ("overrides", "others"),
    [
        ([], {}),
        (["actor.num_nodes=2", "actor.num_gpus_per_node=4"], {"policy": 8}),
        ([*PPO], {"critic": 1}),
        ([*PPO, "critic.num_nodes=2", "critic.num_gpus_per_node=2"], {"critic": 4}),
        (["critic.num_gpus_per_node=4"], {}),  # nobody needs a critic
        (["algo.advantage.estimator=own.py:mine", "critic.enable=true"], {"critic": 1}),
        (["algo.kl.init_coef=0.1", "ref.num_gpus_per_node=2"], {"reference": 2}),
        (["ref.num_gpus_per_node=2"], {}),
        ([*SCORED, "reward.model_num_ranks=2"], {"reward": 2}),
        (["reward.model_num_ranks=2"], {}),
    ],
)
def test_ranks_by_model(overrides, others):
    assert model_ranks(config(*overrides)) == NOBODY | others


def test_the_members_of_a_run_are_those_that_were_placed():
    checked = config(*PPO, *SCORED, "reward.model_num_ranks=2", "vllm.num_engines=3")
    placement = place(checked, {"CPU": 8})

    members = run_members(checked, placement, threads=2)

    counts = {"engine": 3, "policy": 1, "critic": 1, "reference": 0, "reward": 2, "rollout": 1, "scoring": 1}
    assert {role: member.count for role, member in members.items()} == counts
    assert members["policy"].environment["OMP_NUM_THREADS"] == "2"
    assert members["critic"].share == placement.rank


def test_critic_and_reward_model_have_gpus_of_their_own():
    checked = config(*PPO, *SCORED, "reward.model_num_ranks=2", "critic.num_gpus_per_node=4")

    assert total(place(checked, {"CPU": 64, "GPU": 8}), checked, "gpus") == 1 + 1 + 4 + 2
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .*ranks: 1 policy \+ 4 critic \+ 2 reward"):
        place(checked, {"CPU": 64, "GPU": 7})


# --- supervised runs


@pytest.mark.parametrize(("gpus", "device", "each"), [(0, "cpu", 0), (2, "gpu", 1)])
def test_a_supervised_run_is_its_ranks(gpus, device, each):
    found, share = place_supervised(supervised("model.num_gpus_per_node=2"), {"CPU": 4, "GPU": gpus})

    assert (found, share.cpus, share.gpus) == (device, 1.0, each)


def test_a_supervised_run_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"needs 4 GPUs \(model\.num_nodes × model\.num_gpus_per_node\)"):
        place_supervised(supervised("model.num_gpus_per_node=4", "train.batch_size=8"), {"CPU": 4, "GPU": 2})
    with pytest.raises(ConfigError, match="ds.param_dtype='fp16' needs a GPU"):
        place_supervised(supervised("ds.param_dtype=fp16"), {"CPU": 4})
