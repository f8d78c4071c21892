"""One rank of a model that learns, whatever its objective: gradients, optimizer steps, weights, state.

One optimizer step, on every rank at once::

    accumulate   for each micro-batch: the objective's forward pass and loss ─▶ backward
    apply        clip, optimizer; not if a loss or the gradient is not finite
"""

from __future__ import annotations

import contextlib
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_core.algorithms.schedules import lr_factor
from rlhf_core.telemetry import get_logger
from rlhf_core.training import checkpoint, lora, weights
from rlhf_core.training.ds_config import SHARDED_PARAMETERS, trained_config
from rlhf_core.training.moe import gather_experts_together
from rlhf_core.training.moving_average import MovingAverage
from rlhf_core.training.offload import HostOffload, engine_tensors, module_tensors
from rlhf_core.training.optimizers import make_optimizer
from rlhf_core.training.packing import refuse_leaks, refuse_splits
from rlhf_core.training.sequence_parallel import sequence_split
from rlhf_core.training.step import StepTally
from rlhf_core.training.tensor_parallel import divide_layers, total_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from rlhf_core.batching import MicroBatch, RankPlans
    from rlhf_core.config.trained import DeepSpeedConfig, TrainedModelConfig
    from rlhf_core.training.packing import PackingScorer
    from rlhf_core.training.ranks import RankInfo
    from rlhf_core.training.step import LossPart
    from rlhf_core.weights import TensorMeta

logger = get_logger(__name__)

# The version of a model in the middle of an update or a restore: should it break off, nobody takes the weights for version k.
HALF_UPDATED = -2


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and how it is trained."""

    module: PackingScorer  # what DeepSpeed wraps: its forward is the objective's forward pass
    hf_model: PreTrainedModel  # knows the parameters' Hugging Face names; shares them with ``module``
    heads: tuple[nn.Parameter, ...]  # its output layers
    source: str  # folder or id it was loaded from, whose tokenizer goes with it
    settings: TrainedModelConfig
    chat_template: str | None = None  # that replaced the tokenizer's own: exports carry it


class EngineTrainer:
    """A model under DeepSpeed. ``init_distributed`` comes first; every method is a collective.

    Args:
        model: the model.
        ds: DeepSpeed's settings.
        rank: who this process is.
        total_steps: optimizer steps of the whole run, which the learning rate is spread over.
        ema_beta: decay of a moving average of the weights; None: none is kept.

    Raises:
        TrainingError: rows are packed (``ds.packing_samples``), and the model does not keep them apart; or they, or its layers,
            are divided over ranks (``ds.sequence_parallel_size``, ``ds.tensor_parallel_size``), which changes what it answers.
    """

    def __init__(
        self, model: TrainedModel, ds: DeepSpeedConfig, rank: RankInfo, total_steps: int, ema_beta: float | None = None
    ) -> None:
        self.rank = rank = rank.grouped(ds)
        self.total_steps = total_steps
        if ds.ring_attn_size > 1 and rank.rank == 0:
            logger.info(
                "ds.ring_attn_size is taken as ds.sequence_parallel_size=%d (DeepSpeed-Ulysses)", ds.ranks_per_row
            )
        self.hf_model = model.hf_model
        self.version = 0  # updates applied: the version of the weights as they are
        self.optimizer_steps = 0  # that changed the weights
        self._ds, self._settings = ds, model.settings
        self._tokenizer = checkpoint.TokenizerSource(model.source, model.chat_template)
        if model.settings.gradient_checkpointing_enable:
            self.hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.engine, self._peak_lrs = self._initialize(model)
        model.module.split = sequence_split(rank)
        refuse_leaks(model.module, self.engine, rank.torch_device)
        refuse_splits(model.module, self.engine, rank.torch_device)
        self._offload = HostOffload(lambda: engine_tensors(self.engine), rank.torch_device)
        self.average = None if ema_beta is None else MovingAverage(self.hf_model, self.engine.optimizer, ema_beta, rank)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Around all steps of one update. The version goes up by one at its end; broken off, the weights have no version."""
        self.engine.train()
        after, self.version = self.version + 1, HALF_UPDATED
        yield
        self.version = after

    def take_step(
        self, plan: RankPlans, loss_of: Callable[[MicroBatch], LossPart], names: Sequence[str]
    ) -> tuple[StepTally, float | None]:
        """One optimizer step: its tally over all ranks, and the norm of its gradient before clipping.

        Args:
            plan: the micro-batches of every rank.
            loss_of: forward pass and loss of one of them; the sum over all is the loss of the step.
            names: of the statistics of a ``LossPart``.

        Returns:
            None instead of a norm if a loss or the gradient was not finite: the weights stay as they were.
        """
        tally = self.sum_gradients(plan, loss_of, names)
        grad_norm = self.apply()
        if grad_norm is None:
            logger.warning("step skipped: its loss or gradient is not finite; the weights stay as they were")
        return tally, grad_norm

    def sum_gradients(
        self, plan: RankPlans, loss_of: Callable[[MicroBatch], LossPart], names: Sequence[str]
    ) -> StepTally:
        """Forward and backward over this rank's share of a step. The gradient of the whole step is then complete.

        If a loss is not finite on any rank, the last backward makes every gradient NaN: ``apply`` then drops them all
        by DeepSpeed's own path, whatever the ZeRO stage.
        """
        tally = StepTally(names, self.rank.torch_device, self.rank.answers)
        micro_batches = plan[self.rank.data_rank]
        for k, micro_batch in enumerate(micro_batches):
            last = k == len(micro_batches) - 1
            part = loss_of(micro_batch)
            tally.add(part)
            loss = part.loss * self.rank.replicas  # DeepSpeed takes the mean over them; the loss is a sum
            if last and not tally.reduce():
                loss = loss * math.nan
            self.engine.set_gradient_accumulation_boundary(last)
            self.engine.backward(loss)
        return tally

    def apply(self) -> float | None:
        """Take the optimizer step; the norm of its gradient before clipping.

        None if the gradient is not finite: it is thrown away, and nothing changes.
        """
        for group, peak in zip(self.engine.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * self.lr_factor
        norm = self._plain_grad_norm()
        if norm is not None and not math.isfinite(norm):
            self.engine.zero_grad()
            return None
        self.engine.step()
        if not self.engine.was_step_applied():
            return None
        self.optimizer_steps += 1
        if self.average is not None:
            self.average.update()
        return float(self.engine.get_global_grad_norm()) if norm is None else norm

    @property
    def lr_factor(self) -> float:
        """Of the next optimizer step: the learning rate as a share of its peak."""
        settings = self._settings
        warmup_steps = math.ceil(settings.lr_warmup_ratio * self.total_steps)
        return lr_factor(
            self.optimizer_steps, self.total_steps, warmup_steps, settings.min_lr_ratio, settings.lr_scheduler
        )

    @property
    def has_adapters(self) -> bool:
        """True if the model itself is frozen: see ``lora``."""
        return self._ds.lora.rank > 0

    @property
    def next_lr(self) -> float:
        """AdamW's learning rate in the next optimizer step."""
        return self._settings.adam.lr * self.lr_factor

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor): see ``weights.named_weights``."""
        return weights.named_weights(self.hf_model)

    def weight_metadata(self) -> list[TensorMeta]:
        """What ``named_weights`` yields. Of this rank alone."""
        return weights.weight_metadata(self.hf_model)

    def weight_digest(self) -> str:
        """sha256 of the fp32 master weights, or of fp32 parameters."""
        return weights.weight_digest(self.hf_model, self.engine.optimizer)

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Leave the device to others: everything moves to host memory, all but the parameters where they are kept. What is away
        stays away.
        """
        self._offload.offload(keep=module_tensors(self.engine.module) if keep_parameters else ())

    def reload(self, *, parameters_only: bool = False) -> None:
        """Move everything back to the device, or only the parameters, which are all that a weight sync reads."""
        self._offload.reload(only=module_tensors(self.engine.module) if parameters_only else None)

    def check_loaded(self, *, parameters_only: bool = False) -> None:
        """Return if nothing is in host memory, or no parameter is. Nothing else here asks.

        Raises:
            RuntimeError: something is.
        """
        self._offload.check_here(module_tensors(self.engine.module) if parameters_only else None)

    def export_hf(self, folder: str | Path) -> None:
        """Write model and tokenizer as a Hugging Face folder."""
        checkpoint.export_hf(self.hf_model, self.named_weights(), self._tokenizer, Path(folder), self.rank)

    def export_average(self, folder: str | Path) -> None:
        """Write the moving average as a Hugging Face folder."""
        assert self.average is not None, "train.enable_ema"
        checkpoint.export_hf(self.hf_model, self.average.weights(), self._tokenizer, Path(folder), self.rank)

    def export_adapter(self, folder: str | Path) -> None:
        """Write the adapters as a folder of PEFT's."""
        assert self.has_adapters, "ds.lora.rank"
        lora.export_adapter(self.hf_model, self._tokenizer.path, Path(folder), self.rank)

    def save(self, folder: str | Path) -> None:
        """Write the whole training state below a local folder."""
        checkpoint.save_state(self._learner, Path(folder), self._state())

    def load(self, folder: str | Path) -> None:
        """Go on from what ``save`` wrote, bit for bit.

        Raises:
            TrainingError: no such checkpoint, or one of another type; or, where it is not universal, of another number of
                ranks, ZeRO stage or division of layers.
        """
        expected, self.version = self._state(), HALF_UPDATED  # until it is loaded whole
        state = checkpoint.load_state(self._learner, Path(folder), expected)
        self.version, self.optimizer_steps = state.version, state.optimizer_steps

    def _initialize(self, model: TrainedModel) -> tuple[Any, list[float]]:
        import deepspeed

        mpu = divide_layers(self.hf_model, self.rank)
        if self._ds.zero_stage == SHARDED_PARAMETERS:
            gather_experts_together(model.module)
        heads = frozenset(id(parameter) for parameter in model.heads)
        optimizer = make_optimizer(model.module, heads, model.settings)
        peaks = [group["lr"] for group in optimizer.param_groups]
        # Without ZeRO, in half precision, DeepSpeed takes a step with gradients of 0 to make the states: it must neither decay
        # the weights nor count as AdamW's first step, which would then be 0.73 of the next.
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # ``apply`` sets it before each step
        engine, *_ = deepspeed.initialize(
            model=model.module, optimizer=optimizer, config=trained_config(self._ds, model.settings), mpu=mpu
        )
        optimizer.state.clear()
        return engine, peaks

    def _plain_grad_norm(self) -> float | None:
        """ZeRO 0 in fp32, where DeepSpeed neither reports the norm nor refuses one that is not finite; else None."""
        if self._ds.zero_stage != 0 or self._ds.param_dtype != "fp32":
            return None
        return total_norm(self.engine.module.parameters())

    @property
    def _learner(self) -> checkpoint.Learner:
        return checkpoint.Learner(self.engine, self.hf_model, self.average, self.rank)

    def _state(self) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(
            version=self.version,
            optimizer_steps=self.optimizer_steps,
            world_size=self.rank.world_size,
            zero_stage=self._ds.zero_stage,
            tensor_parallel_size=self._ds.tensor_parallel_size,
            param_dtype=self._ds.param_dtype,
            universal=self._ds.use_universal_ckpt,
            lora_rank=self._ds.lora.rank,
        )


def seed_everything(seed: int) -> None:
    """Every generator of this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
