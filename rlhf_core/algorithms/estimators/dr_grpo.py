"""Dr. GRPO: reward minus the group's mean, nothing divided (Liu et al. 2025, arXiv:2503.20783).

Its loss is divided by a constant length: ``aggregation.aggregate(mode="constant_length")``.
"""

from rlhf_core.algorithms.estimators.base import Estimator, centre

DR_GRPO = Estimator("dr_grpo", centre, needs_group=True)
