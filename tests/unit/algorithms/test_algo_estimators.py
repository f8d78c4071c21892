import pytest
import torch
from torch import tensor

from rlhf_core.algorithms.estimators import ESTIMATORS, Estimator, estimator_named
from rlhf_core.errors import ConfigError, TrainingError

GROUPS = [[1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [2, -1, 0, 0]]
GROUP_ESTIMATORS = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"]


def shaped(name, rewards, dtype=torch.float64):
    return ESTIMATORS[name].shape_group(tensor(rewards, dtype=dtype)).tolist()


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [0] * 4, [2.333333, -1.666667, -0.333333, -0.333333]]),
        ("dr_grpo", [[0.5, -0.5, -0.5, 0.5], [0] * 4, [1.75, -1.25, -0.25, -0.25]]),
        ("reinforce_baseline", [[0.5, -0.5, -0.5, 0.5], [0] * 4, [1.75, -1.25, -0.25, -0.25]]),
        (
            "group_norm",
            [[0.866025, -0.866025, -0.866025, 0.866025], [0] * 4, [1.390759, -0.993399, -0.19868, -0.19868]],
        ),
        ("reinforce", GROUPS),
        ("gae", GROUPS),
    ],
)
def test_shaped_rewards(name, expected):
    for rewards, row in zip(GROUPS, expected, strict=True):
        assert shaped(name, rewards) == pytest.approx(row, abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "seven", "one"),
    [("rloo", 0.05, -0.35), ("group_norm", 0.353553, -2.474874), ("dr_grpo", 0.04375, -0.30625)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_case_49_seven_against_one(name, seven, one, dtype):
    """.35 × 7 and 0: no rounding residue becomes an advantage of thousands."""
    assert shaped(name, [0.35] * 7 + [0.0], dtype) == pytest.approx([seven] * 7 + [one], abs=1e-6)


@pytest.mark.golden
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_case_51_equal_rewards_are_exactly_zero(name):
    """v = .001 … .999, n = 2 … 16."""
    for n in range(2, 17):
        for thousandths in range(1, 1000):
            assert not any(shaped(name, [thousandths / 1000] * n)), (n, thousandths)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_is_zero(name):
    assert shaped(name, [3.0]) == [0.0]


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_estimators_without_groups_keep_a_lone_reward(name):
    assert shaped(name, [3.0]) == [3.0]


def test_table_of_properties():
    """name: whitened, needs a group, keeps step rewards, needs a critic, free gamma (ALGORITHMS section 2)."""
    table = {
        e.name: (e.whiten, e.needs_group, e.keeps_step_rewards, e.needs_critic, e.free_gamma)
        for e in ESTIMATORS.values()
    }

    assert table == {
        "gae": (True, False, True, True, True),
        "reinforce": (True, False, True, False, True),
        "reinforce_baseline": (True, True, False, False, False),
        "rloo": (False, True, False, False, False),
        "group_norm": (False, True, False, False, False),
        "dr_grpo": (False, True, False, False, False),
    }


def test_names_are_those_of_the_configuration():
    assert all(estimator_named(name).name == name for name in ESTIMATORS)
    with pytest.raises(ConfigError, match="unknown estimator 'grpo'"):
        estimator_named("grpo")


@pytest.mark.parametrize(
    "shape",
    [
        lambda rewards_G: rewards_G.mean(),
        lambda rewards_G: rewards_G.tolist(),
        lambda rewards_G: rewards_G / 0,
    ],
    ids=["one number", "a list", "not finite"],
)
def test_a_shape_that_gives_no_finite_number_a_sample_is_an_error(shape):
    with pytest.raises(TrainingError, match=r"'mine' made .* of the rewards \[1.0, 0.0\]: its shape must return"):
        Estimator("mine", shape).shape_group(tensor([1.0, 0.0]))
