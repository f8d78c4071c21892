"""Names and cells of what people see."""

import re

import pytest

from tasks.report import CELL, artifact_key, cell


@pytest.mark.parametrize(
    ("run_id", "key"),
    [
        ("lively-otter-0a1b", "lively-otter-0a1b-samples"),
        ("GRPO_tiny.v2", "grpo-tiny-v2-samples"),
        ("--a__b--", "a-b-samples"),
        ("7", "7-samples"),
    ],
)
def test_an_artifact_key(run_id, key):
    assert artifact_key(run_id, "samples") == key
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key)


def test_a_short_text_is_shown_whole():
    assert cell("x" * CELL) == "x" * CELL


def test_a_long_text_is_cut_and_says_so():
    shown = cell("x" * (CELL + 1))

    assert shown == "x" * CELL + f" … ({CELL + 1} characters)"
