"""REINFORCE++: discounted returns, whitened over the batch (Hu 2025, arXiv:2501.03262)."""

from rlhf_core.algorithms.estimators.base import Estimator, keep

REINFORCE = Estimator("reinforce", keep, whiten=True, keeps_step_rewards=True, free_gamma=True)
