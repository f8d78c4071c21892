"""The advantage estimators by name (``algo.advantage.estimator``). A new one is one short file and one line here."""

from __future__ import annotations

from rlhf_core.algorithms.estimators.base import Estimator
from rlhf_core.algorithms.estimators.dr_grpo import DR_GRPO
from rlhf_core.algorithms.estimators.gae import GAE
from rlhf_core.algorithms.estimators.group_norm import GROUP_NORM
from rlhf_core.algorithms.estimators.reinforce import REINFORCE
from rlhf_core.algorithms.estimators.reinforce_baseline import REINFORCE_BASELINE
from rlhf_core.algorithms.estimators.rloo import RLOO
from rlhf_core.algorithms.registry import look_up, register

__all__ = ["ESTIMATORS", "Estimator", "estimator_named", "register_estimator"]

ESTIMATORS: dict[str, Estimator] = {
    estimator.name: estimator for estimator in (GAE, REINFORCE, REINFORCE_BASELINE, RLOO, GROUP_NORM, DR_GRPO)
}


def estimator_named(name: str) -> Estimator:
    """The estimator of that name; an unknown name is a ``ConfigError``."""
    return look_up(ESTIMATORS, "estimator", name)


def register_estimator(estimator: Estimator) -> None:
    """Add a user's own estimator; a name that is taken is a ``ConfigError``."""
    register(ESTIMATORS, "estimator", estimator.name, estimator)
