"""One rank of the policy: scores rows, learns from experiences, hands out its weights.

One update, on every rank at once::

    experiences ─▶ plan_update ─▶ for each optimizer step:
        refuse a step with non-finite inputs
        accumulate   for each micro-batch: collate ─▶ log-probs ─▶ loss ─▶ backward
        apply        clip, AdamW; not if the loss or the gradient is not finite
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.algorithms.schedules import lr_factor
from rlhf_core.batching import collate_experiences, plan_update
from rlhf_core.telemetry import get_logger
from rlhf_core.training import checkpoint, weights
from rlhf_core.training.ds_config import parameter_groups, policy_config
from rlhf_core.training.model import TokenScorer, load_causal_lm
from rlhf_core.training.objective import MicroBatchLoss, filler_loss, micro_batch_loss
from rlhf_core.training.report import StepTally, UpdateReport, UpdateTally
from rlhf_core.training.scoring import score_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from rlhf_core.batching import MicroBatch, OptimizerStep, TokenRow
    from rlhf_core.config import Config
    from rlhf_core.records import Experience
    from rlhf_core.training.ranks import RankInfo

logger = get_logger(__name__)

# The version of a policy in the middle of an update: should the update break off, nobody takes the weights for version k.
HALF_UPDATED = -2


class PolicyTrainer:
    """The policy under DeepSpeed.

    ``init_distributed`` comes first. Every method is a collective: call it on all ranks with the same arguments.

    Args:
        config: the run's.
        model_path: Hugging Face id or folder of the starting point.
        rank: who this process is.
        total_steps: optimizer steps of the whole run, which the learning rate is spread over.

    Raises:
        TrainingError: the model cannot be loaded.
    """

    def __init__(self, config: Config, model_path: str, rank: RankInfo, total_steps: int) -> None:
        self.config, self.model_path, self.rank, self.total_steps = config, model_path, rank, total_steps
        self.version = 0  # updates applied: the policy version of the weights as they are
        self.optimizer_steps = 0  # that changed the weights
        _seed_everything(config.train.seed)
        self.causal_lm = load_causal_lm(config, model_path)
        if config.actor.gradient_checkpointing_enable:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.engine = self._initialize(TokenScorer(self.causal_lm, config.ds.logprob_chunk))

    def logprobs(self, rows: Sequence[TokenRow]) -> dict[int, NDArray[np.float32]]:
        """Log-probs of this rank's share of the rows, at their temperature.

        By index of the row, ``[T]``, 0 outside actions. The shares of all ranks together are all rows, each once.

        Raises:
            TrainingError: a row does not fit into the token budget, or has an action that nothing predicts.
        """
        self.engine.eval()
        return score_rows(self.engine, rows, self.rank, self.config)

    def update(self, rows: Sequence[Experience], iteration: int, kl_coef: float = 0.0) -> UpdateReport:
        """Train on the experiences of one iteration, all of them given to every rank.

        The version goes up by one in any case, so that versions and iterations stay in step.

        Args:
            rows: those without action tokens are left out.
            iteration: with the seed, the seed of the order of rows.
            kl_coef: weight of the KL as a loss; used with ``algo.kl.use_loss``.
        """
        started = time.monotonic()
        self.engine.train()
        tally = UpdateTally()
        lr = self.next_lr
        steps = self.plan(rows, iteration)
        after, self.version = self.version + 1, HALF_UPDATED
        for step in steps:
            lr = self.next_lr
            self._take_step(step, rows, kl_coef, tally)
        self.version = after
        return tally.report(
            lr=lr,
            seconds=time.monotonic() - started,
            has_reference=any(row.ref_logprobs is not None for row in rows),
        )

    def plan(self, rows: Sequence[Experience], iteration: int) -> list[OptimizerStep]:
        """The optimizer steps of an update."""
        train = self.config.train
        return plan_update(
            [len(row.token_ids) for row in rows],
            [row.num_actions for row in rows],
            world_size=self.rank.world_size,
            samples_per_step=self.config.samples_per_step,
            max_epochs=train.max_epochs,
            seed=train.seed,
            iteration=iteration,
            micro_batch_size=train.micro_batch_size,
            token_budget=train.max_tokens_per_gpu if train.dynamic_batch_enable else None,
        )

    def accumulate(self, step: OptimizerStep, rows: Sequence[Experience], kl_coef: float) -> StepTally:
        """Forward and backward over this rank's share of a step. The gradient of the whole step is then complete.

        If a loss is not finite on any rank, the last backward makes every gradient NaN: ``apply`` then drops them all
        by DeepSpeed's own path, whatever the ZeRO stage.
        """
        tally = StepTally(self.rank.torch_device)
        micro_batches = step.micro_batches[self.rank.rank]
        for k, micro_batch in enumerate(micro_batches):
            last = k == len(micro_batches) - 1
            part = self._loss(step, micro_batch, rows, kl_coef)
            tally.add(part)
            loss = part.loss * self.rank.world_size  # DeepSpeed takes the mean over ranks; the loss is a sum
            if last and not tally.reduce():
                loss = loss * math.nan
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.backward(loss)
        return tally

    def apply(self) -> float | None:
        """Take the optimizer step; the norm of its gradient before clipping.

        None if the gradient is not finite: it is thrown away, and nothing changes.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.next_lr
        norm = self._plain_grad_norm()
        if norm is not None and not math.isfinite(norm):
            self.engine.zero_grad()
            return None
        self.engine.step()
        if not self.engine.was_step_applied():
            return None
        self.optimizer_steps += 1
        return float(self.engine.get_global_grad_norm()) if norm is None else norm

    @property
    def next_lr(self) -> float:
        """The learning rate of the next optimizer step."""
        actor = self.config.actor
        warmup_steps = math.ceil(actor.lr_warmup_ratio * self.total_steps)
        factor = lr_factor(self.optimizer_steps, self.total_steps, warmup_steps, actor.min_lr_ratio, actor.lr_scheduler)
        return actor.adam.lr * factor

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor): see ``weights.named_weights``."""
        return weights.named_weights(self.causal_lm)

    def weight_digest(self) -> str:
        """sha256 of the fp32 master weights, or of fp32 parameters."""
        return weights.weight_digest(self.causal_lm, self.engine.optimizer)

    def export_hf(self, folder: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        checkpoint.export_hf(self.causal_lm, self.model_path, Path(folder), self.rank)

    def save(self, folder: str | Path) -> None:
        """Write the whole training state below a local folder."""
        checkpoint.save_state(self.engine, Path(folder), self._state(), self.rank)

    def load(self, folder: str | Path) -> None:
        """Go on from what ``save`` wrote, bit for bit.

        Raises:
            TrainingError: no such checkpoint, or one of another number of ranks, ZeRO stage or type.
        """
        state = checkpoint.load_state(self.engine, Path(folder), self._state(), self.rank)
        self.version, self.optimizer_steps = state.version, state.optimizer_steps

    def _initialize(self, scorer: TokenScorer) -> Any:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=scorer,
            model_parameters=parameter_groups(scorer, self.config.actor.adam.weight_decay),
            config=policy_config(self.config, self.rank.world_size),
        )
        return engine

    def _take_step(self, step: OptimizerStep, rows: Sequence[Experience], kl_coef: float, tally: UpdateTally) -> None:
        bad = _first_bad_row(step, rows)
        if bad is not None:
            logger.warning(
                "step skipped: group %s sample %s has a non-finite log-prob or advantage",
                bad.group_id,
                bad.sample_index,
            )
            tally.skipped()
            return
        parts = self.accumulate(step, rows, kl_coef)
        grad_norm = self.apply()
        if grad_norm is None:
            logger.warning("step skipped: its loss or gradient is not finite; the weights stay as they were")
            tally.skipped()
        else:
            tally.applied(parts, grad_norm)

    def _loss(
        self, step: OptimizerStep, micro_batch: MicroBatch, rows: Sequence[Experience], kl_coef: float
    ) -> MicroBatchLoss:
        batch = collate_experiences([rows[i] for i in micro_batch.rows]).to(self.rank.torch_device)
        tokens = batch.tokens
        scores = self.engine(tokens.input_ids_BT, tokens.action_mask_BT, tokens.temperature_B, want_entropy=True)
        if micro_batch.filler:
            return filler_loss(scores)
        return micro_batch_loss(self.config, step, batch, scores, kl_coef)

    def _plain_grad_norm(self) -> float | None:
        """ZeRO 0 in fp32, where DeepSpeed neither reports the norm nor refuses one that is not finite; else None."""
        if self.config.ds.zero_stage != 0 or self.config.ds.param_dtype != "fp32":
            return None
        gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _state(self) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(
            version=self.version,
            optimizer_steps=self.optimizer_steps,
            world_size=self.rank.world_size,
            zero_stage=self.config.ds.zero_stage,
            param_dtype=self.config.ds.param_dtype,
        )


def _first_bad_row(step: OptimizerStep, rows: Sequence[Experience]) -> Experience | None:
    """The first row of a step whose numbers are not all finite. Every rank sees all rows, so all decide alike."""
    for plan in step.micro_batches:
        for micro_batch in plan:
            for i in micro_batch.rows:
                arrays = (rows[i].old_logprobs, rows[i].rollout_logprobs, rows[i].ref_logprobs, rows[i].advantages)
                if not all(np.isfinite(array).all() for array in arrays if array is not None):
                    return rows[i]
    return None


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
