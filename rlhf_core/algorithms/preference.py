"""Losses on pairs of answers, one number a pair: reward models (Bradley and Terry), DPO, cDPO and IPO.

::

    scores [B], [B] ───────────────────────────────▶ bradley_terry_loss ─▶ loss_B, scores, correct_B
    logprobs [R, T] ─▶ pair_logprobs (sum or mean) ─▶ dpo_loss, ipo_loss ─▶ loss_B, implicit rewards, correct_B

R = 2B rows: the chosen answers of B pairs, then the rejected ones in the same order. The caller adds the pairs up and
divides by the number of pairs of the *whole optimizer step* over all ranks, as ``aggregation`` does with tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from rlhf_core.algorithms.aggregation import masked_mean
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceOutput:
    """Pair losses, and what the model thinks of both answers."""

    loss_B: Tensor  # with a graph
    chosen_B: Tensor  # score or implicit reward of the chosen answer; detached, as below
    rejected_B: Tensor

    @property
    def correct_B(self) -> Tensor:
        """Bool: the chosen answer is the better one. A tie is not: DPO starts with ties alone."""
        return self.chosen_B > self.rejected_B

    @property
    def margin_B(self) -> Tensor:
        """By how much."""
        return self.chosen_B - self.rejected_B


@dataclass(frozen=True, slots=True, eq=False)
class PairLogprobs:
    """Log-probs of whole answers, ``[B]`` each: sums over their tokens for DPO, means for IPO."""

    chosen_B: Tensor  # of the policy that is trained, with a graph
    rejected_B: Tensor
    ref_chosen_B: Tensor  # of the frozen reference
    ref_rejected_B: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DirectInput:
    """One micro-batch of direct preference optimisation. What stands outside the mask does not count, NaN included."""

    logprobs_RT: Tensor  # of the policy that is trained, with a graph
    ref_logprobs_RT: Tensor  # of the frozen reference
    mask_RT: Tensor  # bool, tokens of the answers
    loss: str  # dpo, ipo
    beta: float
    label_smoothing: float = 0.0
    nll_coef: float = 0.0


def bradley_terry_loss(
    chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | None = None, center_coef: float = 0.0
) -> PreferenceOutput:
    """``-log sigmoid(c - r - margin) + center_coef (c + r)²``.

    The likelihood of the preference under Bradley and Terry's model (Ouyang et al. 2022, arXiv:2203.02155, eq. 1), with
    the margin of Llama 2 (arXiv:2307.09288, eq. 2) and the centring of Eisenstein et al. 2023 (arXiv:2312.09244, eq. 2),
    which settles the constant that the likelihood leaves open.

    Args:
        chosen_B: scores of the better answers, with a graph.
        rejected_B: scores of the worse answers, with a graph.
        margin_B: by how much the better ones are better; default 0.
        center_coef: weight of the squared sum of both scores.
    """
    chosen_B, rejected_B = chosen_B.float(), rejected_B.float()
    gap_B = chosen_B - rejected_B
    loss_B = -logsigmoid(gap_B if margin_B is None else gap_B - margin_B)
    if center_coef > 0:
        loss_B = loss_B + center_coef * (chosen_B + rejected_B).square()
    return PreferenceOutput(loss_B, chosen_B.detach(), rejected_B.detach())


def direct_preference_loss(inputs: DirectInput) -> PreferenceOutput:
    """The loss named by ``dpo.loss``, plus ``dpo.nll_coef`` times ``chosen_nll``; an unknown one is a ``ConfigError``."""
    tensors = inputs.logprobs_RT, inputs.ref_logprobs_RT, inputs.mask_RT
    if inputs.loss == "dpo":
        out = dpo_loss(pair_logprobs(*tensors, mean=False), inputs.beta, inputs.label_smoothing)
    elif inputs.loss == "ipo":
        out = ipo_loss(pair_logprobs(*tensors, mean=True), inputs.beta)
    else:
        raise ConfigError(f"unknown dpo.loss={inputs.loss!r}: choose dpo or ipo")
    if inputs.nll_coef == 0:
        return out
    nll_B = chosen_nll(inputs.logprobs_RT, inputs.mask_RT)
    return PreferenceOutput(out.loss_B + inputs.nll_coef * nll_B, out.chosen_B, out.rejected_B)


def dpo_loss(pairs: PairLogprobs, beta: float, label_smoothing: float = 0.0) -> PreferenceOutput:
    """``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, where h is the difference of the two log-ratios.

    DPO is e = 0 (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); cDPO takes a share e of the preferences to be the wrong
    way round (Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO", eq. 3). The implicit reward
    of an answer is ``beta log(policy / reference)`` (DPO, section 5).

    Args:
        pairs: sums of log-probs.
        beta: strength of the pull towards the reference.
        label_smoothing: e.
    """
    chosen_B, rejected_B = _log_ratios(pairs)
    logit_B = beta * (chosen_B - rejected_B)
    loss_B = -(1 - label_smoothing) * logsigmoid(logit_B) - label_smoothing * logsigmoid(-logit_B)
    return _direct_output(loss_B, chosen_B, rejected_B, beta)


def ipo_loss(pairs: PairLogprobs, beta: float) -> PreferenceOutput:
    """``(h - 1 / (2 beta))²``, where h is the difference of the two log-ratios (Azar et al. 2023, arXiv:2310.12036, eq. 17).

    The paper writes h for whole answers and is silent on their lengths. Its authors average log-probs over an answer's
    tokens, so that beta means the same for every length (huggingface/trl pull request 1265, huggingface/blog pull
    request 1785): give means.

    Args:
        pairs: means of log-probs.
        beta: strength of the pull towards the reference (tau in the paper).
    """
    chosen_B, rejected_B = _log_ratios(pairs)
    loss_B = (chosen_B - rejected_B - 1 / (2 * beta)).square()
    return _direct_output(loss_B, chosen_B, rejected_B, beta)


def chosen_nll(logprobs_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """``[B]`` mean negative log-likelihood of each chosen answer's tokens (Pang et al. 2024, arXiv:2404.19733, eq. 1)."""
    pairs = len(logprobs_RT) // 2
    return -masked_mean(logprobs_RT[:pairs].float(), mask_RT[:pairs])


def pair_logprobs(logprobs_RT: Tensor, ref_logprobs_RT: Tensor, mask_RT: Tensor, *, mean: bool) -> PairLogprobs:
    """Sums (or means) of the log-probs over each answer's tokens.

    Args:
        logprobs_RT: of the policy, with a graph.
        ref_logprobs_RT: of the reference.
        mask_RT: bool, tokens of the answers.
        mean: divide by the answer's tokens.
    """
    chosen_B, rejected_B = _halves(logprobs_RT, mask_RT, mean)
    ref_chosen_B, ref_rejected_B = _halves(ref_logprobs_RT.detach(), mask_RT, mean)
    return PairLogprobs(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)


def _halves(logprobs_RT: Tensor, mask_RT: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    """(chosen, rejected), ``[B]`` each."""
    sums_R = torch.where(mask_RT, logprobs_RT.float(), 0.0).sum(dim=1)
    chosen_B, rejected_B = (sums_R / mask_RT.sum(dim=1).clamp(min=1) if mean else sums_R).chunk(2)
    return chosen_B, rejected_B


def _log_ratios(pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
    """``log(policy / reference)`` of the chosen and of the rejected answers."""
    return pairs.chosen_B - pairs.ref_chosen_B, pairs.rejected_B - pairs.ref_rejected_B


def _direct_output(loss_B: Tensor, chosen_B: Tensor, rejected_B: Tensor, beta: float) -> PreferenceOutput:
    return PreferenceOutput(loss_B, beta * chosen_B.detach(), beta * rejected_B.detach())
