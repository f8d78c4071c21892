"""Who gets what, before anything starts."""

import pytest
from minimal_config import config

from rlhf_core.cluster.groups import run_members
from rlhf_core.cluster.placement import Node, Share, place, place_supervised, resolve_device
from rlhf_core.config import parse_supervised_config
from rlhf_core.config.group_sizes import model_ranks
from rlhf_core.errors import ConfigError

PPO = ("algo.advantage.estimator=gae",)
SCORED = ("reward.functions=[]", "reward.model_name_or_path=scorer")


def machine(cpus, gpus=0):
    return [Node("here", cpus, gpus)]


def total(placement, what):
    """The sum over all slots of the run."""
    return sum(getattr(slot, what) for slot in placement.slots)


def seated(placement):
    """The processes of each slot, group by group."""
    return [[list(slot.shares) for slot in group.slots] for group in placement.groups]


def supervised(*overrides):
    base = {"model": {"model_name_or_path": "builtin:tiny"}, "data": {"dataset": "chats.jsonl"}}
    return parse_supervised_config(base, overrides)


@pytest.mark.parametrize(
    ("device", "nodes", "resolved"),
    [
        ("auto", machine(4), "cpu"),
        ("auto", [*machine(4), Node("there", 4, 1)], "gpu"),
        ("cpu", machine(4, 1), "cpu"),
        ("gpu", machine(4), "gpu"),
    ],
)
def test_the_device(device, nodes, resolved):
    assert resolve_device(config(f"run.device={device}").run, nodes) == resolved


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
    placement = place(config(*overrides), machine(cpus, gpus))

    assert round(total(placement, "cpus"), 4) <= cpus - 0.2  # Ray counts in 1/10000; the light workers keep theirs
    assert all(share.cpus > 0 for slot in placement.slots for share in slot.shares.values())


def test_a_process_never_reserves_more_than_a_core():
    assert place(config(), machine(64)).seat("engine-0").share.cpus == 1.0


def test_shares_fit_node_by_node():
    """Three processes on nodes of two cores: all the cores together would give each more than a node can."""
    placement = place(config("actor.num_gpus_per_node=2"), [Node("a", 2.2, 0), Node("b", 1.2, 0)])

    assert {share.cpus for slot in placement.slots for share in slot.shares.values()} == {1.0}
    placement = place(config("actor.num_gpus_per_node=2"), [Node("a", 1.7, 0), Node("b", 1.7, 0)])
    assert {share.cpus for slot in placement.slots for share in slot.shares.values()} == {0.75}


def test_gpus_are_counted_per_engine_and_rank():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "actor.num_gpus_per_node=4")

    placement = place(checked, machine(64, 8))

    assert [(slot.gpus, len(slot.shares)) for slot in placement.slots] == [(2, 1)] * 2 + [(1, 1)] * 4
    assert placement.seat("engine-1").share == Share(cpus=2.0, gpus=2)
    assert placement.seat("policy-3").share == Share(cpus=1.0, gpus=1)


def test_no_gpu_is_asked_for_on_cpu():
    placement = place(config("run.device=cpu"), machine(4, 8))

    assert {share.gpus for slot in placement.slots for share in slot.shares.values()} == {0}


def test_too_few_gpus_are_refused_with_the_sum():
    checked = config("vllm.num_engines=2", "vllm.tensor_parallel_size=2", "algo.kl.init_coef=0.1")

    with pytest.raises(ConfigError) as caught:
        place(checked, machine(64, 4))

    message = str(caught.value)
    sum_of = "vllm.num_engines=2 × vllm.tensor_parallel_size=2 + ranks: 1 policy + 1 reference"
    assert f"needs 6 GPUs ({sum_of})" in message
    assert "the cluster has 4: lower one of them or add nodes" in message


def test_a_gpu_run_without_gpus_is_refused():
    with pytest.raises(ConfigError, match="needs 2 GPUs .* the cluster has 0"):
        place(config("run.device=gpu"), machine(64))


def test_the_gpus_of_an_engine_lie_on_one_node():
    checked = config("vllm.tensor_parallel_size=4", "actor.num_gpus_per_node=2")

    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=4: .* on one node.* do not fit on nodes with 2, 2, 2:"
    ):
        place(checked, [Node(name, 8, 2) for name in "abc"])


REPLAY = ("replay.source=first", "vllm.num_engines=2")


def test_a_replay_has_training_ranks_only():
    checked = config(*REPLAY, "algo.kl.init_coef=0.1", "run.device=gpu")

    assert seated(place(checked, machine(64, 2))) == [[["policy-0"], ["reference-0"]]]
    with pytest.raises(ConfigError, match=r"needs 2 GPUs \(ranks: 1 policy \+ 1 reference\)"):
        place(checked, machine(64, 1))


@pytest.mark.parametrize(("rewards", "ranks"), [("source", 0), ("anew", 1)])
def test_a_replay_loads_the_reward_model_only_to_score_again(rewards, ranks):
    checked = config(*REPLAY, f"replay.rewards={rewards}", "reward.model_name_or_path=builtin:tiny")

    assert model_ranks(checked)["reward"] == ranks


# --- who shares

TWO_OF_EACH = (
    *PPO,
    *SCORED,
    "algo.kl.init_coef=0.1",
    "vllm.num_engines=2",
    "actor.num_gpus_per_node=2",
    "ref.num_gpus_per_node=2",
    "critic.num_gpus_per_node=2",
    "reward.model_num_ranks=2",
)


ALONE = (
    "engine-0 | engine-1 | policy-0 | policy-1 | reference-0 | reference-1 | critic-0 | critic-1 | reward-0 | reward-1"
)
ACTOR_REF = (
    "engine-0 | engine-1 | policy-0 reference-0 | policy-1 reference-1 | critic-0 | critic-1 | reward-0 | reward-1"
)
CRITIC_REWARD = (
    "engine-0 | engine-1 | policy-0 | policy-1 | reference-0 | reference-1 | critic-0 reward-0 | critic-1 reward-1"
)
TOGETHER = "engine-0 policy-0 critic-0 reference-0 reward-0 | engine-1 policy-1 critic-1 reference-1 reward-1"


@pytest.mark.parametrize(
    ("keys", "slots"),
    [
        ([], ALONE),
        (["train.colocate_actor_ref=true"], ACTOR_REF),
        (["train.colocate_critic_reward=true"], CRITIC_REWARD),
        (["train.colocate_all=true"], TOGETHER),
    ],
)
@pytest.mark.parametrize("gpus", [0, 10])
def test_who_shares_a_slot(keys, slots, gpus):
    placement = place(config(*TWO_OF_EACH, *keys), machine(64, gpus))

    assert seated(placement) == [[slot.split() for slot in slots.split(" | ")]]
    for slot in placement.slots:
        wanted = sum(share.gpus for share in slot.shares.values())
        assert slot.gpus - 0.001 < wanted <= slot.gpus == (1 if gpus else 0)
        assert len(set(slot.shares.values())) == 1


def test_sharing_needs_fewer_gpus():
    checked = config(*TWO_OF_EACH, "train.colocate_actor_ref=true", "train.colocate_critic_reward=true")

    assert total(place(checked, machine(64, 6)), "gpus") == 6
    with pytest.raises(ConfigError, match=r"needs 6 GPUs .*ranks: 2 policy/reference \+ 2 critic/reward"):
        place(checked, machine(64, 5))


WIDE = ("vllm.tensor_parallel_size=2", "vllm.num_engines=2", "actor.num_gpus_per_node=4", "train.colocate_all=true")


def test_a_colocated_engine_of_several_gpus_has_a_placement_group_of_its_own():
    """One process cannot hold fractions of several GPUs: vLLM's workers, Ray actors, take them in the engine's bundles."""
    checked = config(*WIDE)
    placement = place(checked, [Node("a", 16, 2), Node("b", 16, 2)])

    assert seated(placement) == [
        [["engine-0", "policy-0"], ["engine-0", "policy-1"]],
        [["engine-1", "policy-2"], ["engine-1", "policy-3"]],
    ]
    assert all(group.on_one_node for group in placement.groups)
    seat = placement.seat("engine-1")
    assert (seat.group, seat.slot, seat.share) == (1, 0, Share(cpus=2.0, gpus=0))
    environment = run_members(checked, placement, threads=1)["engine"].environment
    assert environment["VLLM_RAY_BUNDLE_INDICES"] == "0,1"
    assert environment["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"


def test_a_colocated_engine_does_not_fit_across_nodes():
    with pytest.raises(ConfigError, match="the 4 GPUs of the run .* do not fit on nodes with 1, 3:"):
        place(config(*WIDE), [Node("a", 16, 1), Node("b", 16, 3)])


def test_other_engines_know_of_no_bundles():
    checked = config("vllm.tensor_parallel_size=2")

    environment = run_members(checked, place(checked, machine(16, 3)), threads=1)["engine"].environment

    assert not [name for name in environment if name.startswith("VLLM_RAY")]


def test_on_cpu_a_colocated_engine_sits_in_its_first_slot():
    placement = place(config(*WIDE), machine(16))

    assert seated(placement) == [[["engine-0", "policy-0"], ["policy-1"], ["engine-1", "policy-2"], ["policy-3"]]]


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
    placement = place(checked, machine(8))

    members = run_members(checked, placement, threads=2)

    counts = {"engine": 3, "policy": 1, "critic": 1, "reference": 0, "reward": 2, "rollout": 1, "scoring": 1}
    assert {role: member.count for role, member in members.items()} == counts
    assert members["policy"].environment["OMP_NUM_THREADS"] == "2"


def test_critic_and_reward_model_have_gpus_of_their_own():
    checked = config(*PPO, *SCORED, "reward.model_num_ranks=2", "critic.num_gpus_per_node=4")

    assert total(place(checked, machine(64, 8)), "gpus") == 1 + 1 + 4 + 2
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .*ranks: 1 policy \+ 4 critic \+ 2 reward"):
        place(checked, machine(64, 7))


# --- supervised runs


@pytest.mark.parametrize(("gpus", "device", "each"), [(0, "cpu", 0), (2, "gpu", 1)])
def test_a_supervised_run_is_its_ranks(gpus, device, each):
    placement = place_supervised(supervised("model.num_gpus_per_node=2"), machine(4, gpus))

    assert (placement.device, placement.counts) == (device, {"model": 2})
    assert seated(placement) == [[["model-0"], ["model-1"]]]
    assert placement.seat("model-1").share == Share(cpus=1.0, gpus=each)


def test_a_supervised_run_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"needs 4 GPUs \(model\.num_nodes × model\.num_gpus_per_node\)"):
        place_supervised(supervised("model.num_gpus_per_node=4", "train.batch_size=8"), machine(4, 2))
    with pytest.raises(ConfigError, match="ds.param_dtype='fp16' needs a GPU"):
        place_supervised(supervised("ds.param_dtype=fp16"), machine(4))
