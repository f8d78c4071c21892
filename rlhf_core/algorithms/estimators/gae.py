"""PPO: generalised advantage estimation with a critic (Schulman et al. 2016, arXiv:1506.02438)."""

from rlhf_core.algorithms.estimators.base import Estimator, keep

GAE = Estimator("gae", keep, whiten=True, keeps_step_rewards=True, needs_critic=True, free_gamma=True)
