"""The advantage stage's arithmetic: rows with rewards and log-probs become rows to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.algorithms.advantages import AdvantageInput, compute_advantages
from rlhf_core.algorithms.corrections import Mismatch
from rlhf_core.algorithms.estimators import estimator_named
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.shaping import ShapingSettings, shape_rewards
from rlhf_core.records import Experience, Trajectory, action_mask, episodes_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from rlhf_core.config import Config

    # (group, sample, segment) -> [T] log-probs of that row
    Logprobs: TypeAlias = dict[tuple[str, int, int], NDArray[np.float32]]


def make_experience(
    chosen: Sequence[Trajectory],
    old: Logprobs | None,
    ref: Logprobs | None,
    values: Logprobs | None,
    kl_coef: float,
    config: Config,
) -> tuple[list[Experience], dict[str, float]]:
    """Rewards, log-probs and values become advantages (ALGORITHMS section 1), over the whole batch at once.

    Args:
        chosen: the rows, each with its reward; the segments of an episode in their order, all of them.
        old: log-probs of the policy, by row; None with ``reuses_logprobs``.
        ref: of the reference model; None without one.
        values: of the critic, ``[T]``, or ``[T + 1]`` with ``algo.advantage.bootstrap_truncated``; None without one.
        kl_coef: weight of the KL penalty.
        config: the run's.
    """
    algo = config.algo
    mask_BT = _padded([action_mask(row.action_ranges, len(row.token_ids)) for row in chosen]).bool()
    old_BT = None if old is None else _padded([old[row.key] for row in chosen])
    ref_BT = None if ref is None else _padded([ref[row.key] for row in chosen])
    kl_BT = None if ref_BT is None or old_BT is None else kl_estimate(old_BT, ref_BT, algo.kl.estimator)
    episodes = episodes_of(chosen)
    numbers = {episode.key: number for number, episode in enumerate(episodes)}
    episode_B = torch.tensor([numbers[row.key[:2]] for row in chosen])  # the segments of an episode share its reward
    shaped = shape_rewards(
        torch.tensor([_reward(episode.last) for episode in episodes], dtype=torch.float64),
        torch.tensor([episode.num_actions for episode in episodes]),
        torch.tensor([episode.truncated for episode in episodes]),
        ShapingSettings(
            max_new_tokens=config.rollout.max_new_tokens,
            clip_range=config.reward.clip_range,
            overlong_buffer=config.reward.overlong_buffer_len,
            overlong_factor=config.reward.overlong_penalty_factor,
            stop_properly_coef=config.reward.stop_properly_penalty_coef,
        ),
    )
    penalty = kl_BT is not None and not algo.kl.use_loss
    result = compute_advantages(
        AdvantageInput(
            rewards_B=shaped.rewards_N[episode_B],
            group_keys=[row.group_id for row in chosen],
            sample_keys=[row.sample_index for row in chosen],
            mask_BT=mask_BT,
            step_rewards=[row.step_rewards for row in chosen] if any(row.step_rewards for row in chosen) else None,
            kl_BT=kl_BT if penalty else None,
            values_BT=None if values is None else _padded([_values(row, values) for row in chosen]),
            bootstrap_B=_bootstrap(chosen, values) if values and algo.advantage.bootstrap_truncated else None,
        ),
        estimator_named(algo.advantage.estimator),
        gamma=algo.advantage.gamma,
        lambd=algo.advantage.lambd,
        kl_coef=kl_coef if penalty else 0.0,
        no_std_norm=algo.advantage.no_std_norm,
    )
    experience = [
        Experience(
            group_id=row.group_id,
            sample_index=row.sample_index,
            segment_index=row.segment_index,
            token_ids=row.token_ids,
            action_ranges=row.action_ranges,
            rollout_logprobs=row.rollout_logprobs,
            old_logprobs=None if old is None else old[row.key],
            ref_logprobs=None if ref is None else ref[row.key],
            values=None if values is None else _values(row, values),
            advantages=result.advantages_BT[i, : len(row.token_ids)].numpy(),
            returns=result.returns_BT[i, : len(row.token_ids)].numpy(),
            reward=_reward(row),
            shaped_reward=float(result.shaped_B[i]),
            temperature=row.sampling.temperature,
            constrained=row.sampling.constrained,
            images=row.images,
        )
        for i, row in enumerate(chosen)
    ]
    metrics = {
        "advantage/mean": float(result.advantages_BT[mask_BT].mean()),
        "advantage/std": float(result.advantages_BT[mask_BT].std(correction=0)),
        "advantage/zero_groups_share": _zero_groups(chosen, result.group_std_B),
    }
    if old_BT is not None:
        rollout_BT = _padded([row.rollout_logprobs for row in chosen])
        metrics |= Mismatch.of((old_BT - rollout_BT)[mask_BT]).metrics()
    if kl_BT is not None:
        metrics["kl/mean"] = float(kl_BT[mask_BT].mean())
    for name, effect in shaped.effects.items():
        metrics[f"shaping/{name}_mean"] = effect.mean_change
        metrics[f"shaping/{name}_count"] = float(effect.count)
    return experience, metrics


def _values(row: Trajectory, values: Logprobs) -> NDArray[np.float32]:
    """``[T]`` without the one that may follow, 0 outside actions."""
    length = len(row.token_ids)
    return np.where(action_mask(row.action_ranges, length), values[row.key][:length], np.float32(0))


def _bootstrap(chosen: Sequence[Trajectory], values: Logprobs) -> torch.Tensor:
    """``[B]`` the value of what would have followed the last action of a row that was cut off; 0 for the others."""
    return torch.tensor(
        [float(values[row.key][row.action_ranges[-1].end]) if row.stop_reason.truncated else 0.0 for row in chosen],
        dtype=torch.float64,
    )


def _reward(row: Trajectory) -> float:
    assert row.reward is not None, "selection.trainable leaves out what has no reward"
    return row.reward


def _padded(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays], batch_first=True
    )


def _zero_groups(rows: Sequence[Trajectory], std_B: torch.Tensor) -> float:
    """Share of groups without spread: nothing is learned from them by a group estimator."""
    spread = {row.group_id: float(std) for row, std in zip(rows, std_B, strict=True)}
    return sum(std == 0 for std in spread.values()) / len(spread)
