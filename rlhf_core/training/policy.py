"""One rank of the policy: scores rows, learns from experiences, hands out its weights.

One update, on every rank at once::

    experiences ─▶ plan_update ─▶ for each optimizer step:
        refuse a step with non-finite inputs
        accumulate   for each micro-batch: collate (images ahead of time) ─▶ log-probs ─▶ loss ─▶ backward
        apply        clip, optimizer; not if the loss or the gradient is not finite
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rlhf_core.training.experience_trainer import ExperienceTrainer
from rlhf_core.training.lora import add_adapters
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.objective import SUMS, filler_loss, micro_batch_loss
from rlhf_core.training.report import UpdateReport, update_report
from rlhf_core.training.scoring import score_rows
from rlhf_core.training.step import StepsTally
from rlhf_core.training.trainer import HALF_UPDATED, TrainedModel, seed_everything
from rlhf_core.training.visual import ImageReader, eyes_learn, freeze_visual_encoder, load_policy_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rlhf_core.batching import ExperienceBatch, ImageRow, MicroBatch, OptimizerStep
    from rlhf_core.config import Config
    from rlhf_core.records import Experience
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.step import LossPart, StepTally
    from rlhf_core.training.visual import ImageLoader

__all__ = ["HALF_UPDATED", "PolicyTrainer"]


class PolicyTrainer(ExperienceTrainer):
    """The policy under DeepSpeed.

    ``init_distributed`` comes first. Every method is a collective: call it on all ranks with the same arguments.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder of the starting point.
        rank: who this process is.
        total_steps: optimizer steps of the whole run, which the learning rate is spread over.
        load_image: an image by its reference; of a run that shows images.

    Raises:
        TrainingError: the model cannot be loaded; or ``actor.aux_loss_coef`` asks for a balancing loss that it does not have.
        ConfigError: the run shows images, and the model reads none.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: RankInfo,
        total_steps: int,
        load_image: ImageLoader | None = None,
    ) -> None:
        self.config = config
        seed_everything(config.train.seed)
        self._images = ImageReader.of(config, model_path, load_image, learns=eyes_learn(config))
        causal_lm = load_policy_model(config, model_path, reads_images=self._images is not None)
        if config.actor.freeze_visual_encoder:
            freeze_visual_encoder(causal_lm)
        add_adapters(causal_lm, config.ds.lora, config.train.seed)
        scorer = TokenScorer(
            causal_lm,
            config.ds.logprob_chunk,
            balance_experts=config.actor.aux_loss_coef > 0,
            banned_ids=() if self._images is None else self._images.placeholder_ids,
            packs=config.ds.packing_samples,
        )
        heads = tuple(causal_lm.get_output_embeddings().parameters())
        model = TrainedModel(scorer, causal_lm, heads, model_path, config.actor, config.data.tokenizer_chat_template)
        super().__init__(model, config.ds, rank, total_steps, config.train.decay_of_average)

    def logprobs(self, rows: Sequence[ImageRow]) -> dict[int, NDArray[np.float32]]:
        """Log-probs of this rank's share of the rows, at their temperature.

        By index of the row, ``[T]``, 0 outside actions. The shares of all ranks together are all rows, each once.

        Raises:
            TrainingError: a row does not fit into the token budget, or has an action that nothing predicts.
        """
        self.engine.eval()
        return score_rows(self.engine, rows, self.rank, self.config, self._images)

    def update(
        self, rows: Sequence[Experience], iteration: int, kl_coef: float = 0.0, frozen: bool = False
    ) -> UpdateReport:
        """Train on the experiences of one iteration, all of them given to every rank.

        The version goes up by one in any case, so that versions and iterations stay in step.

        Args:
            rows: those without action tokens are left out.
            iteration: with the seed, the seed of the order of rows.
            kl_coef: weight of the KL as a loss; used with ``algo.kl.use_loss``.
            frozen: change nothing but the version: only the critic learns (``critic.freezing_steps``).
        """
        started = time.monotonic()
        tally = StepsTally(SUMS)
        lr = self.next_lr
        steps = [] if frozen else self.plan(rows, iteration)
        reuses_logprobs = any(row.old_logprobs is None for row in rows)
        assert len(steps) <= 1 or not reuses_logprobs, "after one step the log-probs are those of another policy"
        with self.updating():
            for step in steps:
                lr = self.next_lr
                self._take_step(step, rows, kl_coef, tally)
        return update_report(
            tally,
            lr=lr,
            seconds=time.monotonic() - started,
            has_reference=any(row.ref_logprobs is not None for row in rows),
            reuses_logprobs=reuses_logprobs,
        )

    def accumulate(self, step: OptimizerStep, rows: Sequence[Experience], kl_coef: float) -> StepTally:
        """The gradient of a step."""
        batches = self.batches(step, rows)
        return self.sum_gradients(
            step.micro_batches, lambda part: self._loss(step, part, rows, next(batches), kl_coef), SUMS
        )

    def _take_step(self, step: OptimizerStep, rows: Sequence[Experience], kl_coef: float, tally: StepsTally) -> None:
        batches = self.batches(step, rows)
        tally.add(*self.learn(step, rows, lambda part: self._loss(step, part, rows, next(batches), kl_coef), SUMS))

    def _loss(
        self,
        step: OptimizerStep,
        micro_batch: MicroBatch,
        rows: Sequence[Experience],
        batch: ExperienceBatch,
        kl_coef: float,
    ) -> LossPart:
        batch = batch.to(self.rank.torch_device)
        tokens = batch.tokens
        scores = self.engine(
            tokens.input_ids_BT,
            tokens.action_mask_BT,
            tokens.temperature_B,
            want_entropy=True,
            images=tokens.images,
        )
        if micro_batch.filler:
            return filler_loss(scores)
        episode_tokens_B = _episode_tokens(step, micro_batch, rows).to(self.rank.torch_device)
        return micro_batch_loss(self.config, step, batch, scores, kl_coef, episode_tokens_B)


def _episode_tokens(step: OptimizerStep, micro_batch: MicroBatch, rows: Sequence[Experience]) -> torch.Tensor:
    """``[B]`` action tokens of the episode of each row, its other segments included."""
    return torch.tensor([step.episode_tokens.get(row, rows[row].num_actions) for row in micro_batch.rows])
