"""The number that is differentiated, for one micro-batch: a pure function of log-probs and experiences.

``agg(policy loss × correction) + kl_coef × agg(KL) - entropy_coef × agg(entropy) + aux_loss_coef × share × balancing loss``,
where ``agg`` divides by the counts of the whole optimizer step, and ``share`` is that of the step's rows: the sum over
micro-batches and ranks is the loss of the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.corrections import CorrectionInput, CorrectionOutput, correct, weight_sums
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.losses import LossInput, LossOutput, policy_loss_named
from rlhf_core.training.step import LossPart, no_loss

if TYPE_CHECKING:
    from rlhf_core.batching import ExperienceBatch, OptimizerStep
    from rlhf_core.config import Config
    from rlhf_core.training.model import TokenScores

# Sums over action tokens, or shares of the step's loss: they add up over micro-batches and ranks.
SUMS = (
    "policy_loss",
    "aux_loss",
    "tokens",
    "clipped",
    "approx_kl",
    "ratio",
    "entropy",
    "kl",
    "compared",
    "mismatch",
    "mismatch_kl",
    "capped",
    "dropped",
    "log_weight_abs",
    "weight",
    "weight_squared",
)
PEAKS = ("ratio", "log_weight_abs")  # over action tokens: the largest probability ratio, and |log w|


def micro_batch_loss(
    config: Config,
    step: OptimizerStep,
    batch: ExperienceBatch,
    scores: TokenScores,
    kl_coef: float,
    episode_tokens_B: torch.Tensor | None = None,
) -> LossPart:
    """The loss of a micro-batch and its statistics.

    Args:
        config: the run's.
        step: gives the counts of the whole step.
        batch: rows of this micro-batch.
        scores: of the policy that is trained, with a graph, entropies among them.
        kl_coef: weight of the KL, if ``algo.kl.use_loss``.
        episode_tokens_B: see ``aggregate``.
    """
    mask_BT, logprobs_BT, entropy_BT = batch.tokens.action_mask_BT, scores.logprobs_BT, scores.entropy_BT
    assert entropy_BT is not None, "an update asks for entropies"

    def agg(values_BT: torch.Tensor) -> torch.Tensor:
        return aggregate(
            values_BT,
            mask_BT,
            config.loss_aggregation,
            num_tokens=step.num_tokens,
            num_sequences=step.num_sequences,
            length=config.algo.dr_grpo_length or config.rollout.max_new_tokens,
            episode_tokens_B=episode_tokens_B,
        )

    # Without old log-probs nothing has changed since: the ratio is 1, and its gradient that of the log-prob.
    old_logprobs_BT = logprobs_BT.detach() if batch.old_logprobs_BT is None else batch.old_logprobs_BT
    inputs = _loss_input(config, batch, logprobs_BT, old_logprobs_BT)
    policy = policy_loss_named(config.actor.policy_loss_type)(inputs)
    correction = _correction(config, batch, old_logprobs_BT)
    token_loss_BT = policy.loss_BT
    if config.corrects_mismatch:
        token_loss_BT = token_loss_BT * correction.factor_BT
    policy_loss = agg(token_loss_BT)
    loss = policy_loss
    kl_BT = _kl(config, batch, logprobs_BT)
    if config.algo.kl.use_loss:
        loss = loss + kl_coef * agg(kl_BT)
    if config.actor.entropy_coef > 0:
        loss = loss - config.actor.entropy_coef * agg(entropy_BT)
    aux_loss = _aux_loss(step, batch, scores)
    if config.actor.aux_loss_coef > 0:
        assert scores.aux_loss is not None, "an update with this coefficient asks for the balancing loss"
        loss = loss + config.actor.aux_loss_coef * aux_loss
    log_weight_BT = torch.where(mask_BT, old_logprobs_BT - batch.rollout_logprobs_BT, 0.0)
    sums = _sums(
        policy_loss, aux_loss, policy, correction, _masked_sum(entropy_BT, mask_BT), _masked_sum(kl_BT, mask_BT)
    )
    peaks = (inputs.log_ratio_BT.detach().max().exp(), log_weight_BT.abs().max())
    return LossPart(
        loss=loss,
        sums=torch.cat([sums, weight_sums(log_weight_BT[mask_BT])]),
        peaks=dict(zip(PEAKS, peaks, strict=True)),
    )


def filler_loss(scores: TokenScores) -> LossPart:
    """See ``no_loss``. All that a loss is made of is in its graph, as on the ranks that have a loss."""
    logprobs_BT, aux_loss = scores.logprobs_BT, scores.aux_loss
    graph = logprobs_BT if aux_loss is None else logprobs_BT.sum() + aux_loss
    return replace(no_loss(graph, len(SUMS)), peaks=dict.fromkeys(PEAKS, logprobs_BT.new_zeros(())))


def _loss_input(
    config: Config, batch: ExperienceBatch, logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor
) -> LossInput:
    eps_low, eps_high = config.actor.clip_range
    return LossInput(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=old_logprobs_BT,
        advantages_BT=batch.advantages_BT,
        mask_BT=batch.tokens.action_mask_BT,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=config.actor.dual_clip,
    )


def _correction(config: Config, batch: ExperienceBatch, old_logprobs_BT: torch.Tensor) -> CorrectionOutput:
    """Its statistics are wanted in any case: they show that engine and trainer agree."""
    advantage = config.algo.advantage
    low, high = advantage.is_correction_threshold
    inputs = CorrectionInput(
        old_logprobs_BT=old_logprobs_BT,
        rollout_logprobs_BT=batch.rollout_logprobs_BT,
        mask_BT=batch.tokens.action_mask_BT,
        low=low,
        high=high,
        constrained_B=batch.constrained_B,
    )
    return correct(inputs, advantage.is_correction_type)


def _kl(config: Config, batch: ExperienceBatch, logprobs_BT: torch.Tensor) -> torch.Tensor:
    if batch.ref_logprobs_BT is None:
        return torch.zeros_like(batch.advantages_BT)
    return kl_estimate(logprobs_BT, batch.ref_logprobs_BT, config.algo.kl.estimator)


def _aux_loss(step: OptimizerStep, batch: ExperienceBatch, scores: TokenScores) -> torch.Tensor:
    """The micro-batch's share of a mean over the rows of the step.

    It does depend on how rows are cut into micro-batches: it is no mean over tokens, but the product of two such means (how
    often an expert is chosen, how probable it is), and each pass only knows its own.
    """
    if scores.aux_loss is None:
        return scores.logprobs_BT.new_zeros(())
    return scores.aux_loss * (len(batch.tokens.action_mask_BT) / step.num_rows)


def _masked_sum(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_BT, values_BT.detach(), 0.0).sum()


def _sums(
    policy_loss: torch.Tensor,
    aux_loss: torch.Tensor,
    policy: LossOutput,
    correction: CorrectionOutput,
    entropy_sum: torch.Tensor,
    kl_sum: torch.Tensor,
) -> torch.Tensor:
    """In the order of ``SUMS``, but for those of the weights."""
    values = (
        policy_loss.detach(),
        aux_loss.detach(),
        policy.num_tokens,
        policy.clipped_sum,
        policy.kl_sum,
        policy.ratio_sum,
        entropy_sum,
        kl_sum,
        correction.num_tokens,
        correction.mismatch_sum,
        correction.kl_sum,
        correction.capped_sum,
        correction.dropped_sum,
    )
    return torch.stack([value.to(torch.float64) for value in values])
