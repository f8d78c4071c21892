"""The functions that need no file."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rlhf_core.rewards.builtins import BUILTINS, find_last_number


def score(name, answer, label=None, **args):
    """The reward of one sample."""
    (reward,) = BUILTINS[name]([f"Q{answer}"], ["Q"], [label], answers=[answer], **args)
    return reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 9 is 12.", "12"),
        ("1,234", "1234"),
        ("12,345,678.50", "12345678.5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("12.0", "12"),
        ("= -5", "-5"),
        ("\u22125", "-5"),
        ("7-2", "2"),
        ("x2", "2"),
        (".5", "0.5"),
        ("1.2.3", "3"),
        ("1.5e3", "1500"),
        ("1e99999", "99999"),
        ("#### 72", "72"),
        ("1" * 5000, "1" * 5000),
    ],
)
def test_the_last_number(text, number):
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "١٢", "-", ",."])
def test_no_number(text):
    assert find_last_number(text) is None


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [("it is 12", 12, 1), ("12.0", "12", 1), ("1,234", 1234, 1), ("0.1", 0.1, 1), ("12 or 13", 12, 0), ("", 12, 0)],
)
def test_last_number(answer, label, reward):
    assert score("last_number", answer, label) == reward


@pytest.mark.parametrize("label", [None, "no digits", [12], True])
def test_a_label_without_a_number_is_an_error_not_a_wrong_answer(label):
    with pytest.raises(ValueError, match="last_number"):
        score("last_number", "12", label)


@pytest.mark.parametrize(
    ("answer", "label", "args", "reward"),
    [
        (" yes\n", "yes", {}, 1),
        (" yes", "yes", {"strip": False}, 0),
        ("YES", "yes", {}, 0),
        ("YES", "yes", {"ignore_case": True}, 1),
        ("12", 12, {}, 1),
        ("", "yes", {}, 0),
    ],
)
def test_exact_match(answer, label, args, reward):
    assert score("exact_match", answer, label, **args) == reward


@pytest.mark.parametrize(("answer", "reward"), [("12ab", 0.5), ("", 0.0), ("123", 1.0), ("١٢", 0.0), ("\ud800", 0.0)])
def test_digits(answer, reward):
    assert score("digits", answer) == reward


@pytest.mark.parametrize(
    ("answer", "args", "reward"),
    [
        ("<a>1</a>", {"pattern": "<a>.*</a>"}, 1),
        ("so <a>1</a>", {"pattern": "<a>.*</a>"}, 0),
        ("so <a>1</a>", {"pattern": "<a>.*</a>", "mode": "search"}, 1),
    ],
)
def test_regex(answer, args, reward):
    assert score("regex", answer, **args) == reward


def test_regex_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="use 'full' or 'search'"):
        score("regex", "a", pattern="a", mode="match")


@pytest.mark.parametrize(("answer", "reward"), [("x" * 10, 0.0), ("x" * 7, -0.3), ("x" * 12, -0.2)])
def test_length(answer, reward):
    assert score("length", answer, target=10, scale=10) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        ("so it is \\boxed{0.5}", "1/2", 1),
        ("$\\frac{1}{2}$", "\\frac{1}{2}", 1),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("the answer is 7", 7, 1),
        ("\\boxed{3}", "4", 0),
        ("no idea", "4", 0),
        ("", "4", 0),
    ],
)
def test_math(answer, label, reward):
    assert score("math", answer, label) == reward
