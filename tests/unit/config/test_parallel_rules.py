"""One model over many ranks: what divides what; every refusal names key, value and remedy."""

import pytest
from config_samples import config

from rlhf_core.config.parallel_rules import PARALLEL_RULES
from rlhf_core.errors import ConfigError

PACKED = "ds.packing_samples=true"
PAIR = (PACKED, "ds.sequence_parallel_size=2")
TWO_RANKS = "actor.num_gpus_per_node=2"
HALVES = "ds.tensor_parallel_size=2"

REFUSED = {
    # rule -> [(overrides, fragments of the message)]
    "rows_divide": [
        ([TWO_RANKS, "ds.sequence_parallel_size=2"], ["ds.sequence_parallel_size=2", "set ds.packing_samples=true"]),
        ([TWO_RANKS, "ds.ring_attn_size=2"], ["ds.ring_attn_size=2", "set ds.packing_samples=true"]),
        ([*PAIR], ["ds.sequence_parallel_size=2", "the 1 ranks of actor.num_nodes ×", "use a divisor"]),
        (
            [*PAIR, TWO_RANKS, "algo.kl.init_coef=0.1"],
            ["ds.sequence_parallel_size=2", "the 1 ranks of ref.num_nodes ×"],
        ),
        (
            [*PAIR, "actor.num_gpus_per_node=4", "ds.ring_attn_size=4"],
            ["ds.ring_attn_size=4 and ds.sequence_parallel_size=2", "remove ds.ring_attn_size"],
        ),
    ],
    "layers_divide": [
        ([HALVES], ["ds.tensor_parallel_size=2", "the 1 ranks of actor.num_nodes × actor.num_gpus", "use a divisor"]),
        (
            [HALVES, TWO_RANKS, "algo.kl.init_coef=0.1"],
            ["ds.tensor_parallel_size=2", "the 1 ranks of ref.num_nodes × ref.num_gpus_per_node"],
        ),
        (
            [HALVES, TWO_RANKS, "algo.advantage.estimator=gae", "critic.optim=muon"],
            ["the 1 ranks of critic.num_nodes ×", "critic.optim='muon', which orthogonalises whole", "use adam"],
        ),
        ([HALVES, TWO_RANKS, "ds.zero_stage=3"], ["ds.zero_stage=3, which shards every", "use ds.zero_stage=2"]),
        (
            [HALVES, TWO_RANKS, "ds.zero_stage=0"],
            ["ds.zero_stage=0 and ds.param_dtype='bf16'", "use ds.zero_stage=1 or 2"],
        ),
        (
            [HALVES, TWO_RANKS, "ds.param_dtype=fp16"],
            ["ds.tensor_parallel_size=2", "ds.param_dtype='fp16'", "use bf16"],
        ),
        (
            [HALVES, "actor.num_gpus_per_node=4", *PAIR],
            ["ds.tensor_parallel_size=2 divides layers", "ds.sequence_parallel_size=2 rows", "remove one"],
        ),
        ([HALVES, TWO_RANKS, "ds.use_liger_kernel=true"], ["ds.tensor_parallel_size=2", "ds.use_liger_kernel"]),
        (
            [HALVES, TWO_RANKS, "ds.lora.rank=8"],
            ["ds.lora.rank=8 gives adapters to whole layers", "ds.tensor_parallel_size=2", "use ds.zero_stage=3"],
        ),
        (
            [HALVES, TWO_RANKS, "data.max_images_per_prompt=2"],
            ["ds.tensor_parallel_size=2", "data.max_images_per_prompt=2", "use ds.zero_stage=3"],
        ),
    ],
    "copies_are_of_shards": [
        ([TWO_RANKS, "ds.zpg=2"], ["ds.zpg=2", "set ds.zero_stage=3 (it is 2)"]),
        ([TWO_RANKS, "ds.zpg=4", "ds.zero_stage=3"], ["ds.zpg=4", "2 ranks of actor.num_nodes", "the ranks of a node"]),
    ],
    "offload_has_shards": [
        (["ds.adam_offload=true", "ds.zero_stage=0"], ["ds.adam_offload=true", "ds.zero_stage=0", "1, 2 or 3"]),
        (["ds.adam_offload=true", "actor.optim=muon"], ["ds.adam_offload=true", "actor.optim='muon'", "use adam"]),
    ],
}


@pytest.mark.parametrize(("overrides", "fragments"), [case for cases in REFUSED.values() for case in cases])
def test_what_cannot_be_spread_is_refused(overrides, fragments):
    with pytest.raises(ConfigError) as caught:
        config(*overrides)

    assert [part for part in fragments if part not in str(caught.value)] == []


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in PARALLEL_RULES} == set(REFUSED)


@pytest.mark.parametrize("key", ["ds.sequence_parallel_size", "ds.ring_attn_size"])
def test_both_names_of_the_size_are_one_setting(key):
    assert config(PACKED, TWO_RANKS, f"{key}=2").ds.ranks_per_row == 2


@pytest.mark.parametrize("shared", [PAIR, [HALVES]])
def test_a_step_divides_over_groups_of_ranks(shared):
    """Two groups of two ranks."""
    config(*shared, "actor.num_gpus_per_node=4", "train.batch_size=2")

    with pytest.raises(ConfigError, match=r"train.batch_size=1 .* does not divide over 2 groups of 2 ranks"):
        config(*shared, "actor.num_gpus_per_node=4", "train.batch_size=1")


@pytest.mark.parametrize("more", [[], ["ds.param_dtype=fp32", "ds.zero_stage=0"], [PACKED], ["train.enable_ema=true"]])
def test_layers_are_divided_over_ranks(more):
    assert config(HALVES, TWO_RANKS, *more).ds.ranks_together == 2


def test_a_budget_is_that_of_every_rank_of_the_group():
    """A row of 2048 tokens in two parts."""
    budget = ("train.dynamic_batch_enable=true", "data.max_len=2048", "train.max_tokens_per_gpu=1024")
    config(*PAIR, TWO_RANKS, *budget)

    for whole in ([], [HALVES, TWO_RANKS]):  # where layers are divided, each rank has every token
        with pytest.raises(ConfigError, match=r"max_tokens_per_gpu=1024 cannot hold one sample of data.max_len=2048"):
            config(*whole, *budget)
