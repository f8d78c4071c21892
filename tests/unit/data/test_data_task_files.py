"""Our own task files below ``configs/tasks``."""

import re
from pathlib import Path

import pytest

from rlhf_core.data import read_rows

TASKS = Path(__file__).parents[3] / "configs" / "tasks"


def rows(call):
    return [row.values for row in read_rows(f"{TASKS}/{call}")]


def test_digit_prompts_are_short_different_and_seeded():
    prompts = [row["input"] for row in rows("digits.py:prompts?count=256&seed=0")]

    assert len(set(prompts)) == 256
    assert max(map(len, prompts)) < 48
    assert prompts == [row["input"] for row in rows("digits.py:prompts?count=256&seed=0")]
    assert prompts != [row["input"] for row in rows("digits.py:prompts?count=256&seed=1")]


def terms(row):
    a, b = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with the number only\.", row["input"]).groups()
    return int(a), int(b)


def test_arithmetic_labels_are_the_sums():
    for row in rows("arithmetic.py:prompts?count=50"):
        assert row["label"] == str(sum(terms(row)))
        assert max(terms(row)) <= 29


def test_arithmetic_splits_share_no_question_not_even_turned_round():
    """Whatever the seeds: 600 for training, 200 held out."""
    train = {frozenset(terms(row)) for row in rows("arithmetic.py:prompts?count=600&seed=1")}
    test_rows = rows("arithmetic.py:prompts?count=200&split=test&seed=2")

    assert len({row["input"] for row in test_rows}) == 200
    assert not train & {frozenset(terms(row)) for row in test_rows}


@pytest.mark.parametrize(
    ("call", "problem"), [("count=900", "has 682 questions"), ("split=dev", "use 'train' or 'test'")]
)
def test_arithmetic_refuses_what_it_does_not_have(call, problem):
    with pytest.raises(ValueError, match=problem):
        rows(f"arithmetic.py:prompts?{call}")


def num_digits(answer):
    return sum(character in "0123456789" for character in answer)


def test_preferred_answers_have_clearly_more_digits_and_the_same_length():
    for row in rows("preferences.py:pairs?count=300"):
        chosen, rejected = row["chosen"], row["rejected"]

        assert re.fullmatch("[a-z0-9]{6,12}", chosen)
        assert re.fullmatch("[a-z0-9]{6,12}", rejected)
        assert len(chosen) == len(rejected)
        assert num_digits(chosen) - num_digits(rejected) >= 0.25 * len(chosen)


def test_taught_answers_have_every_share_of_digits():
    shares = [num_digits(row["output"]) / len(row["output"]) for row in rows("preferences.py:sft?count=600")]

    assert (min(shares), max(shares)) == (0, 1)
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("call", "key"), [("sft", "input"), ("pairs", "prompt"), ("prompts", "input")])
def test_preference_splits_share_no_prompt_whatever_the_seeds(call, key):
    train = [row[key] for row in rows(f"preferences.py:{call}?count=700&seed=1")]
    test = [row[key] for row in rows(f"preferences.py:{call}?count=200&seed=2&split=test")]

    assert (len(set(train)), len(set(test))) == (700, 200)
    assert not set(train) & set(test)
    assert train == [row[key] for row in rows(f"preferences.py:{call}?count=700&seed=1")]


@pytest.mark.parametrize(
    ("call", "problem"), [("count=900", "has 779 prompts"), ("split=dev", "use 'train' or 'test'")]
)
def test_preferences_refuse_what_they_do_not_have(call, problem):
    with pytest.raises(ValueError, match=problem):
        rows(f"preferences.py:pairs?{call}")
