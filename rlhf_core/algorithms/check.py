"""Before a run starts: the estimator and the loss that it names are loaded, tried, and held against its other settings.

The rules of the configuration know the built-in names only; what a user's file holds shows when it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms import estimators, losses
from rlhf_core.algorithms.losses import LossInput
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.config import Config


def check_algorithms(config: Config) -> None:
    """Refuse an estimator or a loss that cannot be loaded, fails on a small example, or contradicts the configuration.

    Raises:
        ConfigError: with every problem.
    """
    problems = [*_estimator_problems(config), *_loss_problems(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def _estimator_problems(config: Config) -> Iterator[str]:
    name, gamma, n = config.algo.advantage.estimator, config.algo.advantage.gamma, config.rollout.n_samples_per_prompt
    place = f"{estimators.KEY}={name!r}"
    try:
        estimator = estimators.estimator_named(name)
    except ConfigError as error:
        yield str(error)
        return
    try:
        estimator.shape_group(torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64))
    except Exception as error:  # noqa: BLE001  of the user's code
        yield f"{place} fails on the rewards 1, 0, 0.5, 0.25: {type(error).__name__}: {error}"
    if estimator.needs_critic and not config.needs_critic:
        yield f"{place} needs the critic's values: set critic.enable=true"
    if config.needs_critic and not estimator.needs_critic:
        yield f"critic.enable=true, but {place} does not look at values: remove it, or set needs_critic in the Estimator"
    if gamma != 1.0 and not estimator.free_gamma:
        yield f"algo.advantage.gamma={gamma} has no meaning with {place}: set it to 1, or set free_gamma in the Estimator"
    if estimator.needs_group and n < 2:
        yield f"{place} compares the samples of one prompt, but rollout.n_samples_per_prompt={n}: set it to 2 or more"


def _loss_problems(config: Config) -> Iterator[str]:
    name = config.actor.policy_loss_type
    place = f"{losses.KEY}={name!r}"
    try:
        loss = losses.policy_loss_named(name)
    except ConfigError as error:
        yield str(error)
        return
    try:
        loss_BT = loss(_small_batch(config)).loss_BT
    except Exception as error:  # noqa: BLE001  of the user's code
        yield f"{place} fails on a small example: {type(error).__name__}: {error}"
        return
    if not loss_BT.isfinite().all():
        yield f"{place} gives {loss_BT.tolist()} on a small example: make every number of it finite"
    if not loss_BT.requires_grad:
        yield f"{place} has no gradient: make loss_BT from inputs.logprobs_BT"


def _small_batch(config: Config) -> LossInput:
    """Two rows, one without action tokens."""
    logprobs_BT = torch.tensor([[-0.1, -1.0, -2.0], [-0.1, -0.1, -0.1]], requires_grad=True)
    eps_low, eps_high = config.actor.clip_range
    return LossInput(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=logprobs_BT.detach() + 0.1,
        advantages_BT=torch.tensor([[0.0, 1.0, -1.0], [0.0, 0.0, 0.0]]),
        mask_BT=torch.tensor([[False, True, True], [False, False, False]]),
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=config.actor.dual_clip,
    )
