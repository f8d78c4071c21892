import pytest

from rlhf_core.algorithms.schedules import lr_factor
from rlhf_core.errors import ConfigError


@pytest.mark.golden
@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0), (1, 0.3333), (3, 1), (50, 0.5719), (100, 0.1), (101, 0.1), (1000, 0.1)]
)
def test_cosine_with_min_lr(step, expected):
    assert lr_factor(step, 100, 3, 0.1, "cosine_with_min_lr") == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "middle", "end"),
    [("constant", 1, 1), ("linear", 0.5, 0), ("cosine", 0.5, 0), ("cosine_with_min_lr", 0.55, 0.1)],
)
def test_decays(kind, middle, end):
    assert lr_factor(0, 100, 0, 0.1, kind) == 1
    assert lr_factor(50, 100, 0, 0.1, kind) == pytest.approx(middle)
    assert lr_factor(100, 100, 0, 0.1, kind) == lr_factor(200, 100, 0, 0.1, kind) == pytest.approx(end)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_min_lr"])
def test_every_kind_warms_up(kind):
    assert [lr_factor(step, 10, 2, 0.1, kind) for step in range(3)] == [0, 0.5, 1]


def test_all_steps_may_be_warm_up():
    assert lr_factor(5, 5, 5, 0.1, "cosine") == 1


def test_unknown_kind():
    with pytest.raises(ConfigError, match=r"unknown actor\.lr_scheduler='wsd'"):
        lr_factor(0, 1, 0, 0.1, "wsd")
