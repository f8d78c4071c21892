"""The placement as people see it in `rlhf config check`."""

from minimal_config import config

from rlhf_cli.slot_table import cluster_line, slot_table
from rlhf_core.cluster.placement import Node, place

PPO = (
    "algo.advantage.estimator=gae",
    "algo.kl.init_coef=0.1",
    "reward.functions=[]",
    "reward.model_name_or_path=scorer",
)


def drawn(*overrides, cpus=16, gpus=8, light=()):
    placement = place(config(*overrides), [Node("here", cpus, gpus)])
    return "\n".join(slot_table(placement, light))


def test_a_slot_a_process():
    assert drawn(*PPO, light=["rollout", "scoring"]) == (
        "slot  GPU  CPU  engine    policy    critic    reference    reward\n"
        "0       1    1  engine-0\n"
        "1       1    1            policy-0\n"
        "2       1    1                                reference-0\n"
        "3       1    1                      critic-0\n"
        "4       1    1                                             reward-0\n"
        "outside the slots: rollout, scoring, 0.1 CPU each"
    )


def test_pairs_that_share():
    assert drawn(*PPO, "train.colocate_actor_ref=true", "train.colocate_critic_reward=true") == (
        "slot  GPU  CPU  engine    policy        critic        reference        reward\n"
        "0       1    1  engine-0\n"
        "1       1    2            policy-0 1/2                reference-0 1/2\n"
        "2       1    2                          critic-0 1/2                   reward-0 1/2"
    )


def test_all_share():
    keys = ("algo.kl.init_coef=0.1", "train.colocate_all=true", "vllm.num_engines=2")
    ranks = ("actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2")

    assert drawn(*keys, *ranks, cpus=4.4, gpus=2) == (
        "slot  GPU  CPU  engine        policy        reference\n"
        "0       1  2.1  engine-0 1/3  policy-0 1/3  reference-0 1/3\n"
        "1       1  2.1  engine-1 1/3  policy-1 1/3  reference-1 1/3"
    )


def test_an_engine_across_slots():
    keys = ("train.colocate_all=true", "vllm.tensor_parallel_size=2", "actor.num_gpus_per_node=2")

    assert drawn(*keys) == (
        "slot  GPU  CPU  engine        policy\n"
        "0       1    3  engine-0 1/2  policy-0 1/2\n"
        "1       1    1  engine-0 1/2  policy-1 1/2\n"
        "every 2 slots of an engine on one node, its vLLM workers one a slot"
    )


def test_on_cpu_a_slot_is_cores():
    head, slot = drawn("train.colocate_all=true", cpus=2, gpus=0).splitlines()

    assert head == "slot  CPU  engine    policy"
    assert slot == "0     1.8  engine-0  policy-0"


def test_the_middle_of_many_equals_is_left_out():
    keys = ("actor.num_gpus_per_node=8", "vllm.tensor_parallel_size=4")

    assert drawn(*keys, cpus=64, gpus=16) == (
        "slot  GPU  CPU  engine    policy\n"
        "0       4    4  engine-0\n"
        "1       1    1            policy-0\n"
        "…       …    …            …\n"
        "8       1    1            policy-7"
    )


def test_nodes_of_a_kind_are_counted():
    nodes = [Node("head", 32, 0), Node("a", 64, 8), Node("b", 64, 8)]

    assert cluster_line(nodes) == "1 node of 32 CPU + 2 nodes of 64 CPU and 8 GPU"
