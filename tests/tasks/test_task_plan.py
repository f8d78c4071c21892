"""What a run will do: iterations and optimizer steps."""

import pytest
from minimal_config import config
from task_samples import facts

from rlhf_core.errors import ConfigError
from tasks.plan import make_plan


@pytest.mark.parametrize(
    ("prompts", "overrides", "iterations", "steps"),
    [
        (3, [], 1, 1),  # CASE 24: data smaller than a batch
        (8, [], 1, 1),
        (9, [], 2, 2),
        (16, ["train.num_episodes=3"], 6, 6),
        (17, ["train.num_episodes=2"], 6, 6),  # 8, 8, 1 twice: a batch does not cross epochs
        (16, ["train.max_iterations=1"], 1, 1),
        (16, ["train.max_iterations=99"], 2, 2),
        (16, ["train.max_epochs=3"], 2, 6),
        (16, ["train.batch_size=8"], 2, 8),
        (17, ["train.batch_size=8"], 3, 9),  # 4 + 4 + 1: the tail of 4 samples is one step
        (19, ["train.batch_size=8"], 3, 10),  # 4 + 4 + 2
        (19, ["train.batch_size=8", "train.max_iterations=2"], 2, 8),
    ],
)
def test_the_plan(prompts, overrides, iterations, steps):
    """Batches of 8 prompts with 4 samples each."""
    checked = config("rollout.batch_size=8", "rollout.n_samples_per_prompt=4", *overrides)

    plan = make_plan(checked, facts(prompts))

    assert (plan.iterations, plan.total_steps, plan.critic_steps) == (iterations, steps, 0)


GAE = "algo.advantage.estimator=gae"


@pytest.mark.parametrize(
    ("overrides", "steps", "critic_steps"),
    [
        ([GAE], 9, 9),  # 4 + 4 + 1
        ([GAE, "critic.freezing_steps=1"], 5, 9),
        ([GAE, "critic.freezing_steps=2", "train.max_epochs=3"], 3, 27),
        (["critic.freezing_steps=2"], 9, 0),  # there is no critic
    ],
)
def test_the_plan_of_a_critic(overrides, steps, critic_steps):
    """17 prompts in batches of 8, with 4 samples each, 8 samples a step: the policy's schedule begins when it does."""
    checked = config("rollout.batch_size=8", "rollout.n_samples_per_prompt=4", "train.batch_size=8", *overrides)

    plan = make_plan(checked, facts(17))

    assert (plan.total_steps, plan.critic_steps) == (steps, critic_steps)


def test_a_plan_in_which_only_the_critic_learns_is_refused():
    checked = config("rollout.batch_size=8", GAE, "critic.freezing_steps=3")

    assert make_plan(checked, facts(25)).iterations == 4
    with pytest.raises(
        ConfigError, match=r"critic\.freezing_steps=3 leaves none of the run's 3 iterations .*: lower it"
    ):
        make_plan(checked, facts(24))


def test_the_plan_remembers_the_prompts():
    plan = make_plan(config(), facts(5, dropped=2, fingerprint="abc"))

    assert (plan.prompts, plan.dropped, plan.fingerprint) == (5, 2, "abc")
