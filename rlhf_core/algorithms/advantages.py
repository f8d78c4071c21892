"""From rewards to advantages: steps 5 to 9 of the fixed order (steps 1 to 4 are in ``shaping``).

::

    rewards_B ─▶ groups of episodes ─▶ each shaped ─▶ placed on tokens ─▶ − b·KL ─▶ returns or GAE ─▶ whitening
                 (mean, std recorded)

A group is the *episodes* of one prompt. An episode of two segments is two rows and counts once::

    row      0   1   2   3
    group    a   a   a   a
    sample   0   0   1   2
    reward   1   1   0  .5      ─▶ the group is [1, 0, .5]; rows 0 and 1 both get what sample 0 gets

Returns and GAE run through the whole episode (``segments``): its segments, in the order of the rows, are laid end to end.

Everything is computed in float64, so that the order of rows and the amount of padding do not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.returns import discounted_returns, generalised_advantages, place_rewards
from rlhf_core.algorithms.segments import Joined
from rlhf_core.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from rlhf_core.algorithms.estimators import Estimator

MIN_VARIANCE = 1e-8  # whitening of a batch without spread gives 0, not rounding noise


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageInput:
    """A whole batch: whitening and groups must see all of it, so it is never a micro-batch."""

    rewards_B: Tensor  # after clip and penalties; the same for all segments of an episode
    group_keys: Sequence[Hashable]  # [B] the samples of one prompt share it
    sample_keys: Sequence[Hashable]  # [B] the segments of one episode share it, and come in their order
    mask_BT: Tensor  # bool, True where the policy spoke
    step_rewards: Sequence[Sequence[tuple[int, float]]] | None = (
        None  # [B] (token, reward); an episode's sum is in rewards_B
    )
    kl_BT: Tensor | None = None  # per-token estimate, where KL is a reward penalty
    values_BT: Tensor | None = None  # the critic's, index t: before token t is spoken
    bootstrap_B: Tensor | None = (
        None  # value after the last action token; 0 for finished answers. The last segment's counts
    )


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the update stage trains on. Tensors ``[B, T]`` are float32 and 0 outside the mask, ``[B]`` float64."""

    advantages_BT: Tensor
    returns_BT: Tensor  # targets of the critic; without one, the returns before whitening
    shaped_B: Tensor  # the estimator's scalar
    group_mean_B: Tensor  # over the episodes of the row's group
    group_std_B: Tensor  # unbiased; 0 for a group of one


def compute_advantages(
    batch: AdvantageInput,
    estimator: Estimator,
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    kl_coef: float = 0.0,
    no_std_norm: bool = False,
) -> Advantages:
    """Run the pipeline.

    Args:
        batch: all rows of the batch.
        estimator: one of ``ESTIMATORS``, or a user's own.
        gamma: discount per action token; must be 1 unless ``estimator.free_gamma``.
        lambd: GAE's lambda.
        kl_coef: weight ``b`` of the KL penalty on ``batch.kl_BT``.
        no_std_norm: whitening only centres.

    Raises:
        ConfigError: a setting that the estimator, or the input, cannot honour.
        TrainingError: a reward that is not finite, segments of one episode with different rewards, or a step reward
            outside the actions.
    """
    _check(batch, estimator, gamma, kl_coef)
    mask_BT = batch.mask_BT
    shaped_B, mean_B, std_B = shape_groups(batch.rewards_B, batch.group_keys, batch.sample_keys, estimator)
    steps = batch.step_rewards if estimator.keeps_step_rewards else None
    episodes, joined = _joined(batch)
    if joined is None:
        advantages_BT, returns_BT = _credit(episodes, shaped_B, steps, estimator, gamma, lambd, kl_coef)
    else:
        steps_E = None if steps is None else joined.steps(steps)
        credited = _credit(episodes, joined.last(shaped_B), steps_E, estimator, gamma, lambd, kl_coef)
        advantages_BT, returns_BT = (joined.split(values_EL) for values_EL in credited)
    if estimator.whiten:
        advantages_BT = whiten(advantages_BT, mask_BT, centre_only=no_std_norm)
    return Advantages(advantages_BT.float(), returns_BT.float(), shaped_B, mean_B, std_B)


@dataclass(frozen=True, slots=True, eq=False)
class _Episodes:
    """What returns are made from: a row is an episode."""

    mask_EL: Tensor
    kl_EL: Tensor | None
    values_EL: Tensor | None
    bootstrap_E: Tensor | None


def _joined(batch: AdvantageInput) -> tuple[_Episodes, Joined | None]:
    """The batch as episodes, and how they were joined; None where each row is one, so that nothing has to be copied."""
    keys = list(zip(batch.group_keys, batch.sample_keys, strict=True))
    if len(set(keys)) == len(keys):
        return _Episodes(batch.mask_BT, batch.kl_BT, batch.values_BT, batch.bootstrap_B), None
    joined = Joined.of(batch.mask_BT, keys)
    return _Episodes(
        mask_EL=joined.mask_EL,
        kl_EL=None if batch.kl_BT is None else joined.join(batch.kl_BT),
        values_EL=None if batch.values_BT is None else joined.join(batch.values_BT),
        bootstrap_E=None if batch.bootstrap_B is None else joined.last(batch.bootstrap_B),
    ), joined


def _credit(
    episodes: _Episodes,
    shaped_E: Tensor,
    steps: Sequence[Sequence[tuple[int, float]]] | None,
    estimator: Estimator,
    gamma: float,
    lambd: float,
    kl_coef: float,
) -> tuple[Tensor, Tensor]:
    """Advantages before whitening, and returns, ``[E, L]`` float64."""
    mask_EL, values_EL = episodes.mask_EL, episodes.values_EL
    rewards_EL = place_rewards(shaped_E, mask_EL, steps)
    if episodes.kl_EL is not None:
        rewards_EL.sub_(episodes.kl_EL, alpha=kl_coef)  # what this puts outside the mask is not looked at
    if not estimator.needs_critic:
        returns_EL = discounted_returns(rewards_EL, mask_EL, gamma)
        return returns_EL, returns_EL
    assert values_EL is not None  # _check
    advantages_EL = generalised_advantages(
        rewards_EL, values_EL, mask_EL, gamma, lambd, bootstrap_B=episodes.bootstrap_E
    )
    return advantages_EL, torch.where(mask_EL, advantages_EL + values_EL, 0.0)


def shape_groups(
    rewards_B: Tensor, group_keys: Sequence[Hashable], sample_keys: Sequence[Hashable], estimator: Estimator
) -> tuple[Tensor, Tensor, Tensor]:
    """Shaped reward, group mean and group std (unbiased) of each row, ``[B]`` float64, each episode counted once."""
    values_B = rewards_B.detach().to("cpu", torch.float64)
    shaped_B, mean_B, std_B = (torch.zeros_like(values_B) for _ in range(3))
    for episodes in _rows_by_episode(values_B.tolist(), group_keys, sample_keys):
        rewards_G = values_B[[rows[0] for rows in episodes]]
        shaped_G = estimator.shape_group(rewards_G)
        every_row = [row for rows in episodes for row in rows]
        mean_B[every_row] = rewards_G.mean()
        std_B[every_row] = rewards_G.std(correction=1) if len(episodes) > 1 else 0.0
        for rows, shaped in zip(episodes, shaped_G, strict=True):
            shaped_B[rows] = shaped
    return shaped_B.to(rewards_B.device), mean_B.to(rewards_B.device), std_B.to(rewards_B.device)


def whiten(values_BT: Tensor, mask_BT: Tensor, *, centre_only: bool = False) -> Tensor:
    """``[B, T]`` with mean 0 and biased variance 1 over the action tokens, 0 elsewhere."""
    count, other_BT = mask_BT.sum().clamp(min=1), ~mask_BT
    centred_BT = values_BT.masked_fill(other_BT, 0.0)
    centred_BT.sub_(centred_BT.sum() / count).masked_fill_(other_BT, 0.0)
    if centre_only:
        return centred_BT
    variance = centred_BT.flatten() @ centred_BT.flatten() / count  # makes no further [B, T]
    return centred_BT.div_(variance.clamp(min=MIN_VARIANCE).sqrt())


def _rows_by_episode(
    rewards: list[float], group_keys: Sequence[Hashable], sample_keys: Sequence[Hashable]
) -> list[list[list[int]]]:
    """Groups of episodes of row numbers."""
    groups: dict[Hashable, dict[Hashable, list[int]]] = {}
    for row, (group, sample) in enumerate(zip(group_keys, sample_keys, strict=True)):
        rows = groups.setdefault(group, {}).setdefault(sample, [])
        if rows and rewards[rows[0]] != rewards[row]:
            raise TrainingError(
                f"rows {rows[0]} and {row} are segments of one episode (group {group!r}, sample {sample!r}) with "
                f"rewards {rewards[rows[0]]} and {rewards[row]}: give each the reward of the episode"
            )
        rows.append(row)
    return [list(episodes.values()) for episodes in groups.values()]


def _check(batch: AdvantageInput, estimator: Estimator, gamma: float, kl_coef: float) -> None:
    num_rows = len(batch.mask_BT)
    for name in ("rewards_B", "group_keys", "sample_keys", "step_rewards"):
        column = getattr(batch, name)
        if column is not None and len(column) != num_rows:
            raise TrainingError(f"{name} has {len(column)} entries for {num_rows} rows of mask_BT")
    if gamma != 1.0 and not estimator.free_gamma:
        raise ConfigError(
            f"algo.advantage.gamma={gamma} has no meaning with algo.advantage.estimator={estimator.name!r}: "
            "set it to 1, or use the estimator 'reinforce'"
        )
    if estimator.needs_critic and batch.values_BT is None:
        raise ConfigError(
            f"algo.advantage.estimator={estimator.name!r} needs the critic's values: train a critic, or use the "
            "estimator 'reinforce'"
        )
    if kl_coef != 0 and batch.kl_BT is None:
        raise ConfigError(f"a KL penalty of {kl_coef} needs kl_BT: pass the per-token KL, or kl_coef=0")
    bad_rows = (~torch.isfinite(batch.rewards_B)).nonzero().flatten().tolist()
    if bad_rows:
        raise TrainingError(
            f"rewards of rows {bad_rows} are not finite: leave these samples out before advantages are computed"
        )
