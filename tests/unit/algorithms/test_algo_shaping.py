import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.shaping import ShapingSettings, clip_rewards, overlong_penalty, shape_rewards, stop_properly
from rlhf_core.records import ActionRange, action_mask


@pytest.mark.golden
def test_overlong_penalty():
    """max 12, buffer 4, factor 1."""
    lengths = tensor([7, 8, 9, 12, 20])

    penalty = overlong_penalty(lengths, max_new_tokens=12, buffer=4, factor=1.0)

    assert penalty.tolist() == [0, 0, -0.25, -1, -1]


def test_case_83_overlong_penalty_counts_action_tokens_only():
    """3 prompt, 4 action, 3 tool, 5 action: 9 action tokens, not 12."""
    mask = tensor(action_mask([ActionRange(3, 7), ActionRange(10, 15)], 15))

    penalty = overlong_penalty(mask.sum().unsqueeze(0), max_new_tokens=12, buffer=4, factor=1.0)

    assert penalty.item() == -0.25


def test_overlong_factor_scales_the_penalty():
    penalty = overlong_penalty(tensor([10]), max_new_tokens=12, buffer=4, factor=0.5)

    assert penalty.item() == -0.25


def test_clip():
    assert clip_rewards(tensor([-5.0, 0.3, 7.0]), (-1, 2)).tolist() == pytest.approx([-1, 0.3, 2])


@pytest.mark.parametrize(
    ("coef", "expected"),
    [
        (0.5, [0.5, -1, 0, 1]),  # a negative reward is not improved
        (0.0, [0, -1, 0, 1]),
        (-2.0, [-2, -2, -2, 1]),  # replaced, whatever it was
    ],
)
def test_stop_properly(coef, expected):
    rewards, truncated = tensor([1.0, -1, 0, 1]), tensor([True, True, True, False])

    assert stop_properly(rewards, truncated, coef).tolist() == expected


def test_order_is_clip_then_overlong_then_stop_properly():
    """raw 10 -> clip 2 -> overlong -1 -> times .5."""
    settings = ShapingSettings(max_new_tokens=12, clip_range=(-2, 2), overlong_buffer=4, stop_properly_coef=0.5)

    shaped = shape_rewards(tensor([10.0]), tensor([12]), tensor([True]), settings)

    assert shaped.rewards_N.tolist() == [0.5]


def test_each_change_is_reported():
    settings = ShapingSettings(max_new_tokens=12, clip_range=(-2, 2), overlong_buffer=4, stop_properly_coef=0.5)

    shaped = shape_rewards(tensor([4.0, 1.0]), tensor([9, 1]), tensor([False, True]), settings)

    report = {name: (effect.mean_change, effect.count) for name, effect in shaped.effects.items()}
    assert report == {"clip": (-1.0, 1), "overlong": (-0.125, 1), "stop_properly": (-0.25, 1)}


def test_nothing_switched_on_changes_nothing():
    shaped = shape_rewards(tensor([4.0]), tensor([99]), tensor([True]), ShapingSettings(max_new_tokens=12))

    assert shaped.rewards_N.tolist() == [4.0]
    assert shaped.effects == {}


def test_empty_batch():
    empty = torch.zeros(0)
    settings = ShapingSettings(max_new_tokens=12, clip_range=(0, 1))

    shaped = shape_rewards(empty, empty.long(), empty.bool(), settings)

    assert shaped.effects["clip"].mean_change == 0.0
