"""What a function may answer, and what each of its samples gets."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.rewards.answers import DROPPED_LOGS, to_rows


class OnDevice:
    """A tensor, as far as this package looks at one."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


@pytest.mark.parametrize(
    "answer",
    [
        [1, 0],
        (True, False),
        np.array([1.0, 0.0], dtype=np.float16),
        [np.int64(1), np.bool_(False)],
        OnDevice([1.0, 0.0]),
        [OnDevice(1.0), OnDevice(0)],
        {"rewards": [1, 0]},
        {"rewards": np.array([1, 0]), "scores": None, "extra_logs": None},
    ],
)
def test_numbers_of_any_kind_become_floats(answer):
    """CASE 103."""
    rows = to_rows(answer, 2)

    assert [row.reward for row in rows] == [1.0, 0.0]
    assert all(type(row.reward) is float and row.error is None for row in rows)


def test_real_torch_tensors():
    torch = pytest.importorskip("torch")

    rows = to_rows({"rewards": torch.tensor([0.5, 1.0], requires_grad=True), "extra_logs": {"a": torch.tensor(2)}}, 2)

    assert [(row.reward, row.metrics) for row in rows] == [(0.5, {"a": 2.0}), (1.0, {"a": 2.0})]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (None, "answered None"),
        (float("nan"), "answered nan"),
        (float("inf"), "answered inf"),
        ("1.0", "the str '1.0'"),
        ([1.0], "the list [1.0]"),
        (1j, "the complex 1j"),
        (10**400, "beyond the range of float"),
    ],
)
def test_a_bad_entry_fails_its_own_sample_only(entry, named):
    """CASE 100."""
    bad, good = to_rows([entry, 1], 2)

    assert bad.reward is None
    assert named in bad.error
    assert good.reward == 1.0


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([1.0], "1 rewards for 2 samples"),
        ([1.0] * 3, "3 rewards for 2 samples"),
        ({"rewards": [1, 1], "scores": [1]}, "1 scores for 2 samples"),
        (None, "None as rewards of 2 samples"),
        (1, "the int 1 as rewards of 2 samples"),
        ("11", "the str '11' as rewards of 2 samples"),
        ({"reward": [1, 1]}, "without 'rewards'; its keys are the list ['reward']"),
    ],
)
def test_an_answer_for_another_number_of_samples_fails_the_call(answer, named):
    rows = to_rows(answer, 2)

    assert [row.reward for row in rows] == [None, None]
    assert all(named in row.error for row in rows)


@pytest.mark.parametrize("answer", [1, 1.0, True, np.float32(1), {"rewards": OnDevice(1.0)}])
def test_a_bare_number_answers_a_call_of_one_sample(answer):
    assert to_rows(answer, 1)[0].reward == 1.0


def test_scores_are_optional_per_sample_and_checked():
    given, absent, bad = to_rows({"rewards": [1, 1, 1], "scores": [0, None, "x"]}, 3)

    assert (given.reward, given.score) == (1.0, 0.0)
    assert (absent.reward, absent.score, absent.error) == (1.0, None, None)
    assert bad.reward is None
    assert "the str 'x'" in bad.error


def test_extra_logs():
    """CASE 103: text, a key on one sample only, scalars, NaN, lists of another length; every reward stays.

    ========  =======  ==========  ======
    key       value                a / b
    ========  =======  ==========  ======
    both      [1, 2]   per sample  1 / 2
    one       [3, None]            3 / -
    scalar    4        for all     4 / 4
    text      "x"      dropped     each
    mixed     ["y",5]  dropped     a / 5
    nan       [nan,6]  dropped     a / 6
    short     [7]      dropped     each
    ========  =======  ==========  ======
    """
    nan = float("nan")
    logs = {
        "both": [1, 2],
        "one": [3, None],
        "scalar": 4,
        "text": "x",
        "mixed": ["y", 5],
        "nan": [nan, 6],
        "short": [7],
    }

    a, b = to_rows({"rewards": [1, 0], "extra_logs": logs}, 2)

    assert (a.reward, b.reward) == (1.0, 0.0)
    assert a.metrics == {"both": 1.0, "one": 3.0, "scalar": 4.0, DROPPED_LOGS: 4.0}
    assert b.metrics == {"both": 2.0, "scalar": 4.0, "mixed": 5.0, "nan": 6.0, DROPPED_LOGS: 2.0}


def test_extra_logs_that_are_no_dict_are_counted():
    (row,) = to_rows({"rewards": [1], "extra_logs": ["what"]}, 1)

    assert (row.reward, row.metrics) == (1.0, {DROPPED_LOGS: 1.0})
