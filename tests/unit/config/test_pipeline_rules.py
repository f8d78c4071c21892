"""Pipelines: what overlaps, what takes turns, what is corrected; every refusal names key, value and remedy."""

import pytest
from config_samples import config

from rlhf_core.config.pipeline_rules import PIPELINE_RULES, RENORMALISING
from rlhf_core.errors import ConfigError
from rlhf_core.records import SamplingParams

ASYNC = "train.async_enable=true"
PARTIAL = (ASYNC, "train.partial_rollout_enable=true")
LAG_2 = "train.async_queue_size=2"
COLOCATED = "train.colocate_all=true"
WITH_REFERENCE = "algo.kl.init_coef=0.1"
PPO = ("algo.advantage.estimator=gae", "reward.model_name_or_path=org/rm")
UNCORRECTED = "algo.advantage.is_correction_enable=false"

REFUSED = {
    # rule -> [(overrides, fragments of the message)]
    "async_keys_have_a_pipeline": [
        ([LAG_2], ["train.async_queue_size=2 without train.async_enable", "set it to true, or remove"]),
        (["train.partial_rollout_enable=true"], ["train.partial_rollout_enable=True without train.async_enable"]),
        (
            [ASYNC, "train.partial_rollout_kv=keep"],
            ["train.partial_rollout_kv='keep' without train.partial_rollout_enable", "set it to true, or remove"],
        ),
        (
            [ASYNC, "train.partial_rollout_mask_old=true"],
            ["train.partial_rollout_mask_old=True without train.partial_rollout_enable"],
        ),
    ],
    "partial_rollouts_pay": [
        (
            [*PARTIAL, "train.async_queue_size=0"],
            ["train.partial_rollout_enable with train.async_queue_size=0", "raise train.async_queue_size"],
        ),
        (
            [*PARTIAL, "rollout.vllm_generate_batch_size=64"],
            ["rollout.vllm_generate_batch_size=64", "rollout.batch_size=128", "raise it to rollout.batch_size or more"],
        ),
    ],
    "old_tokens_have_one_bound": [
        *(
            ([ASYNC, LAG_2, f"rollout.max_age={age}"], [f"rollout.max_age={age}", "train.async_queue_size=2", "remove"])
            for age in (1, 3)
        ),
        (
            ["rollout.max_age=3"],
            ["rollout.max_age=3", "none is kept", "set rollout.vllm_generate_batch_size", "remove"],
        ),
    ],
    "old_tokens_are_corrected": [
        (
            [ASYNC, LAG_2, UNCORRECTED],
            [
                "algo.advantage.is_correction_enable=false corrects nothing",
                "2 versions older",
                "train.async_queue_size",
                "remove it, or",
                "train.allow_uncorrected=true",
            ],
        ),
        *(
            (
                [ASYNC, f"rollout.{name}={value}"],
                [f"rollout.{name}={value} renormalises", "train.allow_uncorrected=true"],
            )
            for name, value in (("top_p", 0.9), ("top_k", 5), ("min_new_tokens", 2))
        ),
        *(
            ([*overrides, "train.allow_uncorrected=true"], ["train.allow_uncorrected allows nothing", "remove it"])
            for overrides in ((), (UNCORRECTED,), (ASYNC,), (ASYNC, "train.async_queue_size=0", UNCORRECTED))
        ),
    ],
    "turns_do_not_overlap": [
        (
            [COLOCATED, ASYNC],
            ["train.colocate_all", "train.async_enable overlaps", "remove one of them", "train.colocate_actor_ref"],
        ),
        (["vllm.enable_sleep=true"], ["vllm.enable_sleep", "without train.colocate_all", "set it to true, or remove"]),
        (["ds.enable_sleep=true"], ["ds.enable_sleep", "without train.colocate_all", "set it to true, or remove"]),
        ([COLOCATED, "vllm.sleep_level=2"], ["vllm.sleep_level=2 without vllm.enable_sleep", "or remove"]),
        (
            ["train.colocate_actor_ref=true"],
            ["train.colocate_actor_ref", "algo.kl.init_coef=0", "set it > 0, or remove"],
        ),
        (
            ["train.colocate_critic_reward=true", PPO[0]],
            [
                "train.colocate_critic_reward needs a critic and a reward model",
                "reward.model_name_or_path",
                "or remove",
            ],
        ),
        (
            ["train.colocate_critic_reward=true", PPO[1]],
            ["train.colocate_critic_reward needs a critic", "set algo.advantage.estimator='gae'"],
        ),
        (["ref.offload=true"], ["ref.offload", "algo.kl.init_coef=0", "set it > 0, or remove"]),
    ],
    "groups_that_share_gpus_have_one_size": [
        (
            [COLOCATED, "vllm.num_engines=2"],
            [
                "train.colocate_all",
                "vllm.num_engines=2",
                "vllm.tensor_parallel_size=1",
                "actor.num_gpus_per_node = 1",
                "set",
            ],
        ),
        (
            [COLOCATED, WITH_REFERENCE, "ref.num_gpus_per_node=2"],
            ["train.colocate_all", "ref.num_gpus_per_node = 2", "actor.num_gpus_per_node = 1", "or remove"],
        ),
        (
            ["train.colocate_actor_ref=true", WITH_REFERENCE, "ref.num_nodes=2"],
            ["train.colocate_actor_ref", "ref.num_nodes", "= 2 must be", "or remove train.colocate_actor_ref"],
        ),
        (
            ["train.colocate_critic_reward=true", *PPO, "reward.model_num_ranks=2"],
            ["train.colocate_critic_reward", "reward.model_num_ranks = 2", "critic.num_gpus_per_node = 1", "or remove"],
        ),
    ],
    "weights_find_the_engines": [
        (
            [COLOCATED, "vllm.sync_backend=nccl"],
            ["vllm.sync_backend='nccl'", "train.colocate_all", "use 'ipc' or 'auto'"],
        ),
        (["vllm.sync_backend=ipc"], ["vllm.sync_backend='ipc' without train.colocate_all", "use 'nccl' or 'auto'"]),
    ],
}
ROWS = [pytest.param(*row, id=f"{rule}-{i}") for rule, rows in REFUSED.items() for i, row in enumerate(rows)]


@pytest.mark.parametrize(("overrides", "fragments"), ROWS)
def test_a_pipeline_that_cannot_work_is_refused(overrides, fragments):
    with pytest.raises(ConfigError) as caught:
        config(*overrides)

    _, *messages = str(caught.value).splitlines()
    assert len(messages) == 1  # nothing else is wrong with it
    assert [part for part in fragments if part not in messages[0]] == []


def test_every_pipeline_rule_is_tried():
    assert {rule.__name__ for rule in PIPELINE_RULES} == set(REFUSED)


@pytest.mark.parametrize(
    "overrides",
    [
        (ASYNC,),
        (ASYNC, "train.async_queue_size=0"),
        (ASYNC, LAG_2, "rollout.vllm_generate_batch_size=192", "algo.dynamic_filtering_enable=true"),
        (ASYNC, LAG_2, "rollout.max_age=2"),
        (ASYNC, UNCORRECTED, "train.allow_uncorrected=true"),
        (ASYNC, "rollout.top_p=0.9", "train.allow_uncorrected=true"),
        (ASYNC, "train.colocate_actor_ref=true", WITH_REFERENCE),
        (ASYNC, "train.colocate_critic_reward=true", *PPO),
        PARTIAL,
        (*PARTIAL, LAG_2, "train.partial_rollout_kv=keep", "train.partial_rollout_mask_old=true"),
        (*PARTIAL, LAG_2, "rollout.vllm_generate_batch_size=192"),
        (COLOCATED,),
        (COLOCATED, "vllm.enable_sleep=true", "vllm.sleep_level=2", "ds.enable_sleep=true"),
        (COLOCATED, "ref.offload=true", WITH_REFERENCE),
        (COLOCATED, "actor.num_gpus_per_node=4", "vllm.num_engines=2", "vllm.tensor_parallel_size=2"),
        (COLOCATED, "vllm.sync_backend=ipc"),
        ("vllm.sync_backend=nccl",),
        (UNCORRECTED,),
        ("rollout.top_p=0.9",),
        ("rollout.max_age=3", "algo.dynamic_filtering_enable=true"),
    ],
)
def test_a_pipeline_that_can_work_is_taken(overrides):
    config(*overrides)


def test_the_keys_that_renormalise_are_those_of_the_record():
    sampled = {"top_p": 0.9, "top_k": 5, "min_new_tokens": 2}

    assert set(sampled) == set(RENORMALISING)
    for name, value in sampled.items():
        key = name.replace("new_", "")
        assert SamplingParams(max_tokens=8, **{key: value}).constrained
    assert not SamplingParams(max_tokens=8).constrained


# --- what follows from the keys

FILLED = "rollout.vllm_generate_batch_size=192"


@pytest.mark.parametrize(
    ("overrides", "lag", "age"),
    [
        ((), 0, 0),
        (("algo.dynamic_filtering_enable=true",), 0, None),
        ((FILLED,), 0, None),
        ((FILLED, "rollout.max_age=3"), 0, 3),
        ((ASYNC,), 1, 1),
        ((ASYNC, "train.async_queue_size=0"), 0, 0),
        ((ASYNC, LAG_2, FILLED), 2, 2),
        ((ASYNC, LAG_2, "replay.source=a"), 0, None),
    ],
)
def test_how_far_behind_a_rollout_and_a_token_may_be(overrides, lag, age):
    checked = config(*overrides)

    assert (checked.rollout_lag, checked.max_age) == (lag, age)


@pytest.mark.parametrize(
    ("overrides", "pauses", "carries"),
    [
        ((), False, False),
        ((ASYNC, FILLED), False, False),
        (PARTIAL, True, False),
        ((*PARTIAL, LAG_2, FILLED), True, True),
        ((*PARTIAL, LAG_2, "algo.dynamic_filtering_enable=true"), True, True),
        ((*PARTIAL, LAG_2, FILLED, "replay.source=a"), False, False),
    ],
)
def test_what_a_weight_sync_and_an_iteration_leave_in_flight(overrides, pauses, carries):
    checked = config(*overrides)

    assert (checked.pauses_requests, checked.carries_unfinished) == (pauses, carries)


@pytest.mark.parametrize(
    ("overrides", "corrects"),
    [
        ((), False),
        (("algo.advantage.is_correction_enable=true",), True),
        ((ASYNC,), True),
        ((ASYNC, "train.async_queue_size=0"), False),
        ((ASYNC, UNCORRECTED, "train.allow_uncorrected=true"), False),
        ((ASYNC, "replay.source=a"), False),
    ],
)
def test_the_correction_is_on_where_older_versions_may_speak(overrides, corrects):
    assert config(*overrides).corrects_mismatch is corrects


def test_a_replay_has_the_keys_of_its_source_and_overlaps_nothing():
    checked = config(*PARTIAL, LAG_2, FILLED, "train.allow_uncorrected=true", "replay.source=a")

    assert not checked.overlaps
