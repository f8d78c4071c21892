"""What each token of an episode is credited with: turns, steps, segments, penalties, KL; against loops written by hand."""

from dataclasses import replace

import numpy as np
import pytest
from cluster_samples import row
from minimal_config import config

from rlhf_core.cluster.experience import make_experience
from rlhf_core.records import ActionRange, RewardStatus, StepReward, StopReason, VersionSpan, action_mask

pytestmark = pytest.mark.agents

KL, CLIP, MOST, BUFFER, FACTOR = 0.05, (-1.0, 1.5), 16, 6, 0.5
SHAPED = (
    f"reward.clip_range={list(CLIP)}",
    f"rollout.max_new_tokens={MOST}",
    f"reward.overlong_buffer_len={BUFFER}",
    f"reward.overlong_penalty_factor={FACTOR}",
    f"algo.kl.init_coef={KL}",
    "algo.kl.estimator=k1",
)


def turns(*lengths, prompt=3, reward=None, sample=0, segment=0, stop=StopReason.DONE, steps=()):
    """A row: ``prompt`` tokens, then by turns tokens of the policy and of a tool. ``steps``: rewards, turn by turn."""
    ranges, place = [], prompt
    for number, length in enumerate(lengths):
        if number % 2 == 0:
            ranges.append(ActionRange(place, place + length))
        place += length
    logprobs = np.where(action_mask(ranges, place), np.float32(-0.5), np.float32(0))
    return replace(
        row(sample=sample, answer=0),
        segment_index=segment,
        token_ids=np.arange(place, dtype=np.int32),
        action_ranges=tuple(ranges),
        rollout_logprobs=logprobs,
        version_spans=tuple(VersionSpan(start, end, 0) for start, end in ranges),
        step_rewards=tuple(StepReward(end - 1, value) for (_, end), value in zip(ranges, steps, strict=bool(steps))),
        stop_reason=stop,
        reward=reward,
        score=reward,
        reward_status=RewardStatus.OK,
    )


def made(rows, *overrides, **models):
    old = models.get("old", {one.key: one.rollout_logprobs for one in rows})
    settings = config(*overrides)
    return make_experience(rows, old, models.get("ref"), models.get("values"), KL if "ref" in models else 0.0, settings)


def test_case_83_the_penalty_counts_no_tool_tokens():
    """3 prompt, 4 action, 3 tool, 5 action; max 12, buffer 4: 9 tokens cost .25, not the 1 of 12."""
    limits = ("algo.advantage.estimator=reinforce", "rollout.max_new_tokens=12", "reward.overlong_buffer_len=4")

    [experience], _ = made([turns(4, 3, 5, reward=0.0)], *limits)

    assert (experience.shaped_reward, len(experience.token_ids)) == (-0.25, 15)


def test_case_82_a_window_that_fills_in_the_second_turn_is_truncated_and_costs():
    rows = [turns(4, 3, 5, reward=1.0, stop=StopReason.CONTEXT_FULL), turns(4, 3, 5, reward=1.0, sample=1)]

    cut, whole = made(rows, "algo.advantage.estimator=reinforce", "reward.stop_properly_penalty_coef=0.5")[0]

    assert (cut.shaped_reward, whole.shaped_reward) == (0.5, 1.0)


def test_case_91_both_branches_of_a_rewritten_history_are_trained_with_one_reward():
    rows = [
        turns(4, reward=1.0, segment=0),
        turns(2, 3, 1, reward=1.0, segment=1),
        turns(5, reward=0.0, sample=1),
    ]

    first, second, other = made(rows, "algo.advantage.estimator=dr_grpo")[0]

    assert set(first.advantages[first.advantages != 0]) == set(second.advantages[second.advantages != 0]) == {0.5}
    assert (first.num_actions, second.num_actions) == (4, 3)
    assert other.advantages[-1] == -0.5


# --- everything at once, against loops


def episode(draw, sample, stop):
    """One of one to three segments, each of one to three turns; its reward is the sum of its steps'."""
    rows = []
    for segment in range(int(draw.integers(1, 4))):
        count = int(draw.integers(1, 4))
        lengths = [int(draw.integers(1, 4)) for _ in range(2 * count - 1)]
        steps = draw.choice([0.0, 0.5, -1.0, 2.0], count).tolist()
        rows.append(turns(*lengths, sample=sample, segment=segment, stop=stop, steps=steps))
    reward = sum(step.reward for one in rows for step in one.step_rewards)
    return [replace(one, reward=reward, score=reward) for one in rows]


def noise(draw, rows, more=0):
    """A number for each token, and for ``more`` behind it; 0 outside actions where there are no more."""
    return {
        one.key: (draw.normal(-1, 0.3, len(one.token_ids) + more) * (more or one.rollout_logprobs != 0)).astype(
            np.float32
        )
        for one in rows
    }


def by_hand(rows, old, ref, values, gamma, lambd):
    """(row, token) -> (advantage, return), before whitening."""
    tokens = [(one, at) for one in rows for start, end in one.action_ranges for at in range(start, end)]
    rewards = {(one.key, at): -KL * float(old[one.key][at] - ref[one.key][at]) for one, at in tokens}
    excess = min(max(len(tokens) - (MOST - BUFFER), 0), BUFFER)
    rest = min(max(rows[0].reward, CLIP[0]), CLIP[1]) - excess / BUFFER * FACTOR
    for one in rows:
        for at, value in one.step_rewards:
            rewards[one.key, at] += value
            rest -= value
    rewards[tokens[-1][0].key, tokens[-1][1]] += rest
    following, found = 0.0, {}
    next_value = float(values[rows[-1].key][-1]) if values and rows[-1].stop_reason.truncated else 0.0
    for one, at in reversed(tokens):
        value = float(values[one.key][at]) if values else 0.0
        following = rewards[one.key, at] + gamma * next_value - value + gamma * lambd * following
        next_value, found[one.key, at] = value, (following, following + value)
    return found


@pytest.mark.parametrize(("estimator", "gamma", "lambd"), [("reinforce", 0.9, 1.0), ("gae", 0.95, 0.8)])
@pytest.mark.parametrize("seed", range(3))
def test_credit_is_that_of_loops_over_whole_episodes(estimator, gamma, lambd, seed):
    draw = np.random.default_rng(seed)
    stops = (StopReason.DONE, StopReason.LENGTH, StopReason.MAX_TURNS)
    episodes = [episode(draw, sample, stops[sample % 3]) for sample in range(8)]
    rows = [one for played in episodes for one in played]
    old, ref = noise(draw, rows), noise(draw, rows)
    values = noise(draw, rows, more=1) if estimator == "gae" else None
    settings = (f"algo.advantage.estimator={estimator}", f"algo.advantage.gamma={gamma}", *SHAPED)
    settings += (f"algo.advantage.lambd={lambd}", "algo.advantage.bootstrap_truncated=true") if values else ()

    experience, _ = made(rows, *settings, old=old, ref=ref, values=values)

    expected = {}
    for played in episodes:
        expected |= by_hand(played, old, ref, values, gamma, lambd)
    advantages = np.array([advantage for advantage, _ in expected.values()])
    for one in experience:
        mask = action_mask(one.action_ranges, len(one.token_ids))
        key = (one.group_id, one.sample_index, one.segment_index)
        wanted = np.array([expected[key, at] for at in np.flatnonzero(mask)])
        assert one.advantages[mask] == pytest.approx((wanted[:, 0] - advantages.mean()) / advantages.std(), abs=1e-4)
        assert one.returns[mask] == pytest.approx(wanted[:, 1], abs=1e-4)
        assert not one.advantages[~mask].any()
