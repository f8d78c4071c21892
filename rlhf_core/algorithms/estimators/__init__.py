"""The advantage estimators by name (``algo.advantage.estimator``). A new one is one short file and one line here."""

from __future__ import annotations

from rlhf_core.algorithms.estimators.base import Estimator
from rlhf_core.algorithms.estimators.dr_grpo import DR_GRPO
from rlhf_core.algorithms.estimators.gae import GAE
from rlhf_core.algorithms.estimators.group_norm import GROUP_NORM
from rlhf_core.algorithms.estimators.reinforce import REINFORCE
from rlhf_core.algorithms.estimators.reinforce_baseline import REINFORCE_BASELINE
from rlhf_core.algorithms.estimators.rloo import RLOO
from rlhf_core.algorithms.registry import look_up
from rlhf_core.errors import ConfigError
from rlhf_core.user_file import FROM_FILE, object_from_file

__all__ = ["ESTIMATORS", "Estimator", "estimator_named"]

KEY = "algo.advantage.estimator"

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator for estimator in (GAE, REINFORCE, REINFORCE_BASELINE, RLOO, GROUP_NORM, DR_GRPO)
}


def estimator_named(name: str) -> Estimator:
    """The estimator of that name, or the one of a user's file: ``path.py:name``.

    Raises:
        ConfigError: no such name; no such file; it cannot be imported; or what it holds is no ``Estimator``.
    """
    if not FROM_FILE.fullmatch(name):
        return look_up(ESTIMATORS, "estimator", name)
    estimator = object_from_file(KEY, name)
    if not isinstance(estimator, Estimator):
        raise ConfigError(
            f"{KEY}={name!r} is of type {type(estimator).__name__}: make it an Estimator of rlhf_core.algorithms.estimators"
        )
    return estimator
