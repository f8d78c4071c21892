"""REINFORCE++-baseline: reward minus the group's mean, whitened over the batch (Hu 2025, arXiv:2501.03262)."""

from rlhf_core.algorithms.estimators.base import Estimator, centre

REINFORCE_BASELINE = Estimator("reinforce_baseline", centre, whiten=True, needs_group=True)
