"""``I..J``: written wrong, or of iterations that are not all there."""

import pytest

from rlhf_core.config.iteration_range import parse_iterations, within
from rlhf_core.errors import ConfigError


@pytest.mark.parametrize(("text", "span"), [("3..7", (3, 7)), ("3", (3, 3)), (" 0..0 ", (0, 0))])
def test_both_ends_are_included(text, span):
    assert parse_iterations(text) == span


@pytest.mark.parametrize(
    ("text", "problem"), [("3-7", "write first..last"), ("7..3", "write 3..7"), ("", "write first")]
)
def test_no_range(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_iterations(text)


@pytest.mark.parametrize(("asked", "found"), [(None, [0, 1, 3]), ("0..1", [0, 1]), ("3", [3])])
def test_those_that_are_asked_for(asked, found):
    assert within(asked, [0, 1, 3], "url") == found


@pytest.mark.parametrize(("asked", "missing"), [("1..3", 2), ("0..9", 2), ("3..9", 4), ("7", 7), ("3..999999999", 4)])
def test_one_that_is_missing_is_named_and_not_left_out(asked, missing):
    with pytest.raises(ConfigError, match=rf"{asked}: url has no complete iteration {missing} .* it has 0\.\.3"):
        within(asked, [0, 1, 3], "url")


def test_nothing_is_there():
    with pytest.raises(ConfigError, match="url has no complete iteration with trajectories: let it run first"):
        within(None, [], "url")
