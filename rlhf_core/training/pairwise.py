"""One rank of a model that learns from pairs of answers: reward models, and direct preference optimisation.

::

    pairs [B] ─▶ 2B rows ─┬▶ SequenceScorer ─▶ score at each last action token [2B] ─▶ Bradley and Terry's likelihood
       chosen, rejected   └▶ TokenScorer ─▶ log-probs [2B, T] ──────────────────────┬▶ DPO, cDPO, IPO
                          └▶ frozen reference, no gradient ─▶ log-probs [2B, T] ────┘

Both answers of a pair are in one micro-batch; ``sum over pairs / pairs of the whole step`` is the loss of the step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rlhf_core.algorithms.preference import (
    DirectInput,
    PreferenceOutput,
    bradley_terry_loss,
    chosen_nll,
    direct_preference_loss,
)
from rlhf_core.batching import OptimizerStep, collate_pairs, plan_pairs
from rlhf_core.data import PreferenceExample, load_tokenizer
from rlhf_core.errors import TrainingError
from rlhf_core.telemetry import get_logger
from rlhf_core.training.lora import add_adapters
from rlhf_core.training.reference import frozen_scorer
from rlhf_core.training.supervised import (
    SupervisedTrainer,
    balancing_loss,
    balancing_metrics,
    loss_part,
    trained_causal_lm,
)
from rlhf_core.training.trainer import TrainedModel
from rlhf_core.training.value_model import SequenceScorer, load_sequence_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from rlhf_core.config.supervised import SupervisedConfig
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.step import LossPart

logger = get_logger(__name__)

PAIR_SUMS = ("examples", "loss", "correct", "chosen", "rejected")
SCORE_SUMS = (*PAIR_SUMS, "squares")
DPO_SUMS = (*PAIR_SUMS, "chosen_nll", "aux_loss")


class PairTrainer(SupervisedTrainer[PreferenceExample]):
    """What reward models and DPO share."""

    def plan(self, examples: Sequence[PreferenceExample]) -> OptimizerStep:
        """Pairs balanced over the ranks by their tokens; both answers have a token to train."""
        num_actions = [(pair.chosen.num_actions, pair.rejected.num_actions) for pair in examples]
        return plan_pairs(
            [i for i, counts in enumerate(num_actions) if all(counts)],
            [(len(pair.chosen.token_ids), len(pair.rejected.token_ids)) for pair in examples],
            num_actions,
            world_size=self.rank.data_ranks,
            micro_batch_size=self.config.train.micro_batch_size,
            token_budget=self.rank.group_budget(self.config.train.token_budget),
            packed=self.config.ds.packing_samples,
        )


class RewardModelTrainer(PairTrainer):
    """A sequence classifier with one output that learns to score the chosen answer higher.

    A score is read at the last action token: the one that ends the answer. What a template writes behind it does not count.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder of a reward model, or of a language model, which gets a new head.
        rank: who this process is.
        total_steps: optimizer steps of the whole run.

    Raises:
        TrainingError: the model cannot be loaded; or ``train.aux_loss_coef`` is set, which is for language models.
        ConfigError: it comes without a tokenizer.
    """

    sums = SCORE_SUMS

    def __init__(self, config: SupervisedConfig, model_path: str, rank: RankInfo, total_steps: int) -> None:
        if config.train.aux_loss_coef > 0:
            raise TrainingError(
                f"train.aux_loss_coef={config.train.aux_loss_coef}: reward models are trained without a balancing loss; "
                "set it to 0"
            )
        sequence_model = load_sequence_model(config, model_path, config.train.seed)
        name_padding(sequence_model, load_tokenizer(model_path, trust_remote_code=config.run.trust_remote_code))
        scorer = SequenceScorer(sequence_model, config.ds.packing_samples)
        heads, template = tuple(scorer.head.parameters()), config.data.tokenizer_chat_template
        add_adapters(sequence_model, config.ds.lora, config.train.seed, trained_too=heads)
        model = TrainedModel(scorer, sequence_model, heads, model_path, config.model, template)
        super().__init__(config, model, rank, total_steps)

    def train_steps(self, batches: Sequence[Sequence[PreferenceExample]]) -> dict[str, float]:
        """As ``SupervisedTrainer``. ``train/score_mean`` and ``train/score_std`` are over the answers of both kinds."""
        self._forget_padding_that_ends([pair for batch in batches for pair in batch])
        return super().train_steps(batches)

    def loss(self, step: OptimizerStep, examples: Sequence[PreferenceExample]) -> LossPart:
        """Minus the log-likelihood of the preferences."""
        device = self.rank.torch_device
        batch = collate_pairs(examples).to(device)
        rows = [*(pair.chosen for pair in examples), *(pair.rejected for pair in examples)]
        ends_R = torch.tensor([row.action_ranges[-1].end for row in rows], device=device)
        chosen_B, rejected_B = self.engine(batch.input_ids_BT, ends_R).chunk(2)
        margin_B = torch.tensor([pair.margin for pair in examples], dtype=torch.float32, device=device)
        out = bradley_terry_loss(chosen_B, rejected_B, margin_B, self.config.reward_model.center_coef)
        squares = {"squares": torch.cat((out.chosen_B, out.rejected_B)).double().square().sum()}
        return loss_part(out.loss_B.sum() / step.num_sequences, SCORE_SUMS, {**_pair_sums(out), **squares})

    @staticmethod
    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        """``margin`` is the mean of chosen minus rejected score."""
        answers = 2 * sums["examples"]
        mean = (sums["chosen"] + sums["rejected"]) / answers
        return {
            **_pair_metrics(sums, "score"),
            "score_mean": mean,
            "score_std": math.sqrt(max(sums["squares"] / answers - mean**2, 0.0)),
        }

    def _forget_padding_that_ends(self, pairs: Sequence[PreferenceExample]) -> None:
        """An answer that ends with the padding token would be scored one token too early by Hugging Face's class."""
        text_config = self.hf_model.config.get_text_config()
        rows = [row for pair in pairs for row in (pair.chosen, pair.rejected) if row.num_actions]
        ends = {int(row.token_ids[row.action_ranges[-1].end - 1]) for row in rows}
        if text_config.pad_token_id in ends:
            logger.warning(
                "token %d ends answers, so the exported model does not name it as its padding: it scores single rows, and "
                "refuses batches",
                text_config.pad_token_id,
            )
            text_config.pad_token_id = None


class DpoTrainer(PairTrainer):
    """A causal LM that learns to prefer the chosen answer more than the frozen reference does.

    The reference scores each micro-batch when it is trained. So nothing is kept between steps: a resumed run computes the
    same log-probs bit for bit, and starts without a pass through all examples. The price is the reference's weights in
    memory, in ``ds.param_dtype`` and without optimizer states, sharded under ZeRO-3 as the policy's are.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder of the starting point.
        rank: who this process is.
        total_steps: optimizer steps of the whole run.
        ref_path: the reference; default: the starting point.

    Raises:
        TrainingError: a model cannot be loaded.
    """

    sums = DPO_SUMS

    def __init__(
        self, config: SupervisedConfig, model_path: str, rank: RankInfo, total_steps: int, ref_path: str | None = None
    ) -> None:
        super().__init__(config, trained_causal_lm(config, model_path), rank, total_steps)
        self._reference = frozen_scorer(config, ref_path or model_path, rank)

    def loss(self, step: OptimizerStep, examples: Sequence[PreferenceExample]) -> LossPart:
        """``dpo.loss``, plus the balancing loss of a mixture of experts."""
        dpo, batch = self.config.dpo, collate_pairs(examples).to(self.rank.torch_device)
        inputs = batch.input_ids_BT, batch.action_mask_BT, batch.temperature_B
        with torch.no_grad():
            ref_logprobs_RT = self._reference(*inputs, want_entropy=False).logprobs_BT
        scores = self.engine(*inputs, want_entropy=False)
        out = direct_preference_loss(
            DirectInput(
                logprobs_RT=scores.logprobs_BT,
                ref_logprobs_RT=ref_logprobs_RT,
                mask_RT=batch.action_mask_BT,
                loss=dpo.loss,
                beta=dpo.beta,
                label_smoothing=dpo.label_smoothing,
                nll_coef=dpo.nll_coef,
            )
        )
        aux_loss = balancing_loss(scores, len(examples))
        total = out.loss_B.sum() + self.config.train.aux_loss_coef * aux_loss
        nll = chosen_nll(scores.logprobs_BT, batch.action_mask_BT).sum()
        sums = {**_pair_sums(out), "chosen_nll": nll, "aux_loss": aux_loss}
        return loss_part(total / step.num_sequences, DPO_SUMS, sums)

    @staticmethod
    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        """Rewards are the implicit ones, ``beta log(policy / reference)``; ``chosen_nll`` is a mean over answers."""
        chosen_nll = {"chosen_nll": sums["chosen_nll"] / sums["examples"]}
        return {**_pair_metrics(sums, "reward"), **chosen_nll, **balancing_metrics(sums)}


def name_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Let the model's configuration name the tokenizer's padding token, unless that token can end an answer.

    Hugging Face's classifier scores a row at its last token that is not padding. So the padding must be what the tokenizer
    pads with, and no token that ends rows; without one, it scores single rows at their end and refuses batches.
    """
    text_config = model.config.get_text_config()
    listed = text_config.eos_token_id
    ends = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id}
    padding = text_config.pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    usable = padding is not None and padding not in ends and padding < text_config.vocab_size
    text_config.pad_token_id = padding if usable else None


def _pair_sums(out: PreferenceOutput) -> dict[str, torch.Tensor | int]:
    return {
        "examples": len(out.loss_B),
        "loss": out.loss_B.sum(),
        "correct": out.correct_B.sum(),
        "chosen": out.chosen_B.double().sum(),
        "rejected": out.rejected_B.double().sum(),
    }


def _pair_metrics(sums: Mapping[str, float], noun: str) -> dict[str, float]:
    """``noun``: what an answer has: a score or a reward."""
    pairs = sums["examples"]
    return {
        "loss": sums["loss"] / pairs,
        "accuracy": sums["correct"] / pairs,
        f"chosen_{noun}": sums["chosen"] / pairs,
        f"rejected_{noun}": sums["rejected"] / pairs,
        "margin": (sums["chosen"] - sums["rejected"]) / pairs,
        "examples": pairs,
    }
