"""Rewards and log-probs become advantages: the algorithms' numbers, on the rows they belong to."""

import numpy as np
import pytest
from cluster_samples import failed, row, scored
from minimal_config import config

from rlhf_core.cluster.experience import make_experience
from rlhf_core.cluster.selection import trainable, with_rewards
from rlhf_core.records import ActionRange, RewardStatus, SamplingParams, StepReward, StopReason


def logprobs(rows, value):
    """The same log-prob for each action token."""
    return {r.key: np.where(r.rollout_logprobs != 0, np.float32(value), np.float32(0)) for r in rows}


def made(rows, *overrides, old=-0.5, ref=None, values=None, kl_coef=0.0):
    """``old`` None: nobody was asked. ``values``: of the critic, one list a row."""
    olds = None if old is None else logprobs(rows, old)
    refs = None if ref is None else logprobs(rows, ref)
    said = None if values is None else {r.key: np.array(v, np.float32) for r, v in zip(rows, values, strict=True)}
    return make_experience(rows, olds, refs, said, kl_coef, config(*overrides))


def last(experience):
    """Advantage of each row's last action token."""
    return [round(float(e.advantages[-1]), 6) for e in experience]


def golden(answers=(2, 1, 3, 2)):
    """ALGORITHMS section 8: three groups of four."""
    table = {"g0": (1, 0, 0, 1), "g1": (0.5, 0.5, 0.5, 0.5), "g2": (2, -1, 0, 0)}
    return [
        row(name, i, answer=answers[i], reward=float(reward))
        for name, rewards in table.items()
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.golden
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [0.666667, -0.666667, -0.666667, 0.666667, 0, 0, 0, 0, 2.333333, -1.666667, -0.333333, -0.333333]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 1.75, -1.25, -0.25, -0.25]),
        ("group_norm", [0.866025, -0.866025, -0.866025, 0.866025, 0, 0, 0, 0, 1.390759, -0.993399, -0.19868, -0.19868]),
    ],
)
def test_advantages_are_those_of_the_algorithm(estimator, expected):
    experience, metrics = made(golden(), f"algo.advantage.estimator={estimator}")

    assert last(experience) == pytest.approx(expected, abs=1e-6)
    assert metrics["advantage/zero_groups_share"] == pytest.approx(1 / 3)


def test_every_action_token_of_a_row_has_its_advantage_and_no_other():
    experience, _ = made(golden(), "algo.advantage.estimator=dr_grpo")

    assert experience[2].advantages.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert [len(e.advantages) for e in experience[:4]] == [4, 3, 5, 4]
    assert experience[0].advantages.dtype == np.float32


def test_a_row_keeps_what_it_was_sampled_with():
    sampled = row(reward=1.0, sampling=SamplingParams(max_tokens=8, temperature=0.7))

    [made_of], _ = made([sampled], "algo.advantage.estimator=reinforce", old=-0.25)

    assert made_of.token_ids is sampled.token_ids
    assert made_of.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert made_of.old_logprobs.tolist() == [0, 0, -0.25, -0.25]
    assert (made_of.reward, made_of.temperature, made_of.ref_logprobs, made_of.values) == (1.0, 0.7, None, None)


@pytest.mark.parametrize(
    ("sampling", "constrained"),
    [({}, False), ({"temperature": 0.5}, False), ({"top_p": 0.9}, True), ({"top_k": 5}, True)],
)
def test_renormalised_logprobs_are_flagged(sampling, constrained):
    rows = [row(reward=1.0, sampling=SamplingParams(max_tokens=8, **sampling))]

    [made_of], _ = made(rows, "algo.advantage.estimator=reinforce")

    assert made_of.constrained is constrained


def test_a_group_that_lost_a_sample_is_shaped_over_the_rest():
    """CASE 21 and CASE 27, at the end: [1, 0, failed, 0] is the group [1, 0, 0]."""
    rows = [row("g0", 0), row("g0", 1), failed("g0", 2), row("g0", 3)]
    joined = with_rewards(rows, scored(rows, [1.0, 0.0, RewardStatus.SKIPPED, 0.0]))

    experience, _ = made(trainable(joined, "keep_group"), "algo.advantage.estimator=dr_grpo")

    assert [e.sample_index for e in experience] == [0, 1, 3]
    assert last(experience) == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-6)


def test_the_one_sample_left_of_a_group_learns_nothing():
    experience, metrics = made([row(reward=1.0)], "algo.advantage.estimator=group_norm")

    assert experience[0].advantages.tolist() == [0, 0, 0, 0]
    assert metrics["advantage/zero_groups_share"] == 1.0


def test_segments_of_one_episode_count_once():
    """CASE 52: 4 samples [1, 0, 1, 0], each in 2 segments."""
    rows = [row("g0", i, reward=float(1 - i % 2), segment_index=s) for i in range(4) for s in range(2)]

    experience, _ = made(rows, "algo.advantage.estimator=group_norm")

    assert last(experience) == pytest.approx([0.866025, 0.866025, -0.866025, -0.866025] * 2, abs=1e-6)


def test_segments_of_one_episode_share_its_penalty():
    """Only the last segment was cut off: the episode was."""
    rows = [row(reward=1.0), row(reward=1.0, segment_index=1, stop=StopReason.LENGTH)]

    experience, _ = made(rows, "algo.advantage.estimator=reinforce", "reward.stop_properly_penalty_coef=-1")

    assert [e.shaped_reward for e in experience] == [-1.0, -1.0]


# --- KL

KL = ("algo.advantage.estimator=reinforce", "algo.advantage.no_std_norm=true", "algo.kl.init_coef=0.1")


def test_kl_as_a_penalty_is_taken_from_every_action_token():
    """reward 1, KL .5 - .2 = .3 a token, b .1: returns 1 - .06 and 1 - .03."""
    [made_of], metrics = made([row(reward=1.0)], *KL, old=-0.2, ref=-0.5, kl_coef=0.1)

    assert made_of.returns.tolist() == pytest.approx([0, 0, 0.94, 0.97])
    assert metrics["kl/mean"] == pytest.approx(0.3)


def test_the_coefficient_is_that_of_the_iteration_not_of_the_configuration():
    [made_of], _ = made([row(reward=1.0)], *KL, old=-0.2, ref=-0.5, kl_coef=0.2)

    assert made_of.returns.tolist() == pytest.approx([0, 0, 0.88, 0.94])


def test_kl_as_a_loss_leaves_the_rewards_alone():
    [made_of], metrics = made([row(reward=1.0)], *KL, "algo.kl.use_loss=true", old=-0.2, ref=-0.5, kl_coef=0.1)

    assert made_of.returns.tolist() == pytest.approx([0, 0, 1, 1])
    assert made_of.ref_logprobs.tolist() == pytest.approx([0, 0, -0.5, -0.5])
    assert metrics["kl/mean"] == pytest.approx(0.3)


# --- a critic: rows of two prompt tokens and three actions, reward 1

GAE = ("algo.advantage.estimator=gae", "algo.advantage.lambd=0.95", "algo.advantage.no_std_norm=true")
VALUES = [0, 0, 0.2, 0.4, 0.1]


def centred(advantages):
    """Whitening without the division, over one row."""
    return [0, 0, *(np.array(advantages) - np.mean(advantages))]


@pytest.mark.golden
def test_advantages_by_gae_and_what_the_critic_learns():
    """ALGORITHMS section 8: V [.2, .4, .1], r [0, 0, 1], gamma 1, lambda .95."""
    [made_of], _ = made([row(answer=3, reward=1.0)], *GAE, values=[VALUES])

    assert made_of.returns.tolist() == pytest.approx([0, 0, 0.92725, 0.955, 1.0], abs=1e-6)
    assert made_of.advantages.tolist() == pytest.approx(centred([0.72725, 0.555, 0.9]), abs=1e-6)
    assert made_of.values.tolist() == pytest.approx(VALUES)


@pytest.mark.parametrize(("stop", "last_return"), [(StopReason.LENGTH, 1.5), (StopReason.EOS, 1.0)])
def test_an_answer_that_was_cut_off_may_go_on_in_its_value(stop, last_return):
    """The critic gives one value more, .5, for what would have followed; nothing follows an answer that ended."""
    bootstrap = "algo.advantage.bootstrap_truncated=true"

    [made_of], _ = made([row(answer=3, reward=1.0, stop=stop)], *GAE, bootstrap, values=[[*VALUES, 0.5]])

    assert made_of.returns[-1] == pytest.approx(last_return)
    assert made_of.values.tolist() == pytest.approx(VALUES)  # of the row's own tokens only


def test_the_value_after_a_last_action_that_is_not_the_last_token():
    """The environment spoke last: the value that follows the action stands at its first token, and is not trained."""
    cut = row(answer=3, reward=1.0, stop=StopReason.LENGTH, action_ranges=(ActionRange(2, 4),))

    [made_of], _ = made([cut], *GAE, "algo.advantage.bootstrap_truncated=true", values=[[0, 0, 0.2, 0.4, 0.5, 0]])

    assert made_of.returns.tolist() == pytest.approx([0, 0, 0.2 + 0.2 + 0.95 * 1.1, 1.5, 0])
    assert made_of.values.tolist() == pytest.approx([0, 0, 0.2, 0.4, 0])


def test_values_are_not_asked_for_by_other_estimators():
    [made_of], _ = made([row(reward=1.0)], "algo.advantage.estimator=reinforce")

    assert made_of.values is None


# --- shaping


def test_the_reward_stays_raw_beside_the_shaped_one():
    experience, metrics = made([row(reward=7.0)], "algo.advantage.estimator=reinforce", "reward.clip_range=[-1, 1]")

    assert (experience[0].reward, experience[0].shaped_reward) == (7.0, 1.0)
    assert (metrics["shaping/clip_mean"], metrics["shaping/clip_count"]) == (-6.0, 1.0)


def test_overlong_answers_are_penalised():
    """CASE 83: max 12, buffer 4: 9 action tokens -> -.25."""
    overrides = ("algo.advantage.estimator=reinforce", "rollout.max_new_tokens=12", "reward.overlong_buffer_len=4")

    experience, _ = made([row(answer=9, reward=0.0)], *overrides)

    assert experience[0].shaped_reward == -0.25


def test_truncated_answers_are_penalised():
    rows = [row(reward=1.0), row(sample=1, reward=1.0, stop=StopReason.CONTEXT_FULL)]

    experience, _ = made(rows, "algo.advantage.estimator=reinforce", "reward.stop_properly_penalty_coef=0.5")

    assert [e.shaped_reward for e in experience] == [1.0, 0.5]


def test_step_rewards_stay_at_their_tokens():
    """CASE 86: .2 after the first token and 1 after the last; the estimator keeps step rewards."""
    rows = [row(answer=3, reward=1.2, step_rewards=(StepReward(2, 0.2), StepReward(4, 1.0)))]

    experience, _ = made(rows, "algo.advantage.estimator=reinforce")

    assert experience[0].returns.tolist() == pytest.approx([0, 0, 1.2, 1.0, 1.0])


def test_mismatch_is_measured_on_action_tokens():
    _, metrics = made([row(reward=1.0), row(sample=1, reward=0.0)], old=-0.75)

    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.25)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(0.25)
    assert metrics["mismatch/effective_share"] == pytest.approx(1.0)  # all weights are equal


def test_what_the_policy_says_in_its_update_is_left_to_that():
    """With a KL as a loss: it is measured there, too."""
    [made_of], metrics = made([row(reward=1.0)], *KL, "algo.kl.use_loss=true", old=None, ref=-0.5, kl_coef=0.1)

    assert made_of.old_logprobs is None
    assert made_of.ref_logprobs.tolist() == pytest.approx([0, 0, -0.5, -0.5])
    assert made_of.returns.tolist() == pytest.approx([0, 0, 1, 1])
    assert not [name for name in metrics if name.startswith(("mismatch/", "kl/"))]
