import pytest

from rlhf_core.algorithms.registry import look_up, register
from rlhf_core.errors import ConfigError


def test_registered_entry_is_found():
    registry: dict[str, int] = {}

    register(registry, "number", "one", 1)

    assert look_up(registry, "number", "one") == 1


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown number 'tow': choose one of one, two"):
        look_up({"two": 2, "one": 1}, "number", "tow")


def test_a_name_is_not_taken_twice():
    registry = {"one": 1}

    with pytest.raises(ConfigError, match="'one' is registered already"):
        register(registry, "number", "one", 11)

    assert registry == {"one": 1}
