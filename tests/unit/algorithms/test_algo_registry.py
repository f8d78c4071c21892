import pytest

from rlhf_core.algorithms.estimators import ESTIMATORS
from rlhf_core.algorithms.losses import POLICY_LOSSES
from rlhf_core.algorithms.registry import look_up
from rlhf_core.config import rules
from rlhf_core.errors import ConfigError


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown number 'tow': choose one of one, two"):
        look_up({"two": 2, "one": 1}, "number", "tow")


def test_the_configuration_knows_every_name_and_no_other():
    """It must not import this package, so it has a list of its own."""
    assert list(rules.ESTIMATORS) == list(ESTIMATORS)
    assert list(rules.POLICY_LOSSES) == list(POLICY_LOSSES)
    assert set(rules.NEEDS_GROUP) == {name for name, estimator in ESTIMATORS.items() if estimator.needs_group}
    assert set(rules.FIXED_GAMMA) == {name for name, estimator in ESTIMATORS.items() if not estimator.free_gamma}
