"""What follows from the keys."""

import pytest
from config_samples import config


@pytest.mark.parametrize(
    ("overrides", "aggregation"),
    [
        ([], "token"),
        (["algo.advantage.estimator=dr_grpo"], "constant_length"),
        (["actor.policy_loss_type=gspo"], "sample"),
        (["actor.policy_loss_type=gspo", "actor.loss_agg_mode=token"], "token"),
        (["algo.advantage.estimator=dr_grpo", "actor.loss_agg_mode=sample"], "sample"),
    ],
)
def test_loss_aggregation(overrides, aggregation):
    assert config(*overrides).loss_aggregation == aggregation


def test_samples():
    whole, cut = config("rollout.batch_size=4"), config("rollout.batch_size=4", "train.batch_size=16")

    assert (whole.samples_per_iteration, whole.samples_per_step) == (32, 32)
    assert (cut.samples_per_iteration, cut.samples_per_step) == (32, 16)


def test_clip_range():
    assert config().actor.clip_range == (0.2, 0.2)
    assert config("actor.eps_clip_low_high=[0.2, 0.27]").actor.clip_range == (0.2, 0.27)


def test_the_context_is_the_data_length_unless_it_is_said():
    assert config("data.max_len=3000").max_model_len == 3000
    assert config("data.max_len=3000", "vllm.max_model_len=4000").max_model_len == 4000


def test_a_reference_model_is_made_for_kl_only():
    assert not config().needs_reference
    assert config("algo.kl.init_coef=0.01").needs_reference


@pytest.mark.parametrize(
    ("overrides", "reuses"),
    [
        ([], True),
        (["train.batch_size=1024"], True),
        (["train.batch_size=512"], False),
        (["train.max_epochs=2"], False),
        (["algo.kl.init_coef=0.01"], False),
        (["algo.kl.init_coef=0.01", "algo.kl.use_loss=true"], True),
        (["train.async_enable=true"], True),
    ],
)
def test_log_probs_before_the_only_step_are_those_of_the_update(overrides, reuses):
    assert config(*overrides).reuses_logprobs is reuses
