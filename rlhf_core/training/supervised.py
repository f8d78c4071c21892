"""One rank of a model that learns from given examples, whatever its loss: SFT, reward models, DPO.

::

    one iteration   for each batch: plan ─▶ loss of each micro-batch ─▶ backward ─▶ optimizer step ─┐
    an evaluation   all examples:   plan ─▶ loss of each micro-batch, no gradient ──────────────────┴▶ sums ─▶ metrics

A loss is divided by the counts of its whole optimizer step, and its statistics are sums over examples: neither gradient nor
metrics depend on micro-batches or on the number of ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch

from rlhf_core.training.loading import load_causal_lm
from rlhf_core.training.lora import add_adapters
from rlhf_core.training.model import TokenScorer
from rlhf_core.training.step import LossPart, StepsTally, StepTally, no_loss
from rlhf_core.training.trainer import EngineTrainer, TrainedModel, seed_everything

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.batching import MicroBatch, OptimizerStep
    from rlhf_core.config.supervised import SupervisedConfig
    from rlhf_core.training.model import TokenScores
    from rlhf_core.training.ranks import RankInfo

ExampleT = TypeVar("ExampleT")


class SupervisedTrainer(EngineTrainer, ABC, Generic[ExampleT]):
    """A model under DeepSpeed that learns from examples.

    ``init_distributed`` comes first. Every method is a collective: call it on all ranks with the same arguments.

    Args:
        config: the run's.
        model: what is trained.
        rank: who this process is.
        total_steps: optimizer steps of the whole run, which the learning rate is spread over.
    """

    sums: ClassVar[tuple[str, ...]]  # statistics of a ``LossPart``: they add up over micro-batches, ranks and steps

    def __init__(self, config: SupervisedConfig, model: TrainedModel, rank: RankInfo, total_steps: int) -> None:
        self.config = config
        train = config.train
        seed_everything(train.seed)
        super().__init__(model, config.ds, rank, total_steps, train.decay_of_average)

    def train_steps(self, batches: Sequence[Sequence[ExampleT]]) -> dict[str, float]:
        """One iteration: an optimizer step on each batch, in their order. The version goes up by one in any case.

        A step whose loss or gradient is not finite is skipped and counted. Examples without a token to train are left out;
        a batch of nothing else takes no step.

        Returns:
            ``train/…``: the metrics of the examples of the applied steps, each taken before its step; ``grad_norm`` before
            clipping, the mean over the applied steps; ``lr`` of the last step; ``applied_steps``, ``skipped_steps``,
            ``seconds``. What was not measured is not there.
        """
        started = time.monotonic()
        steps = StepsTally(self.sums)
        lr = self.next_lr
        with self.updating():
            for batch in batches:
                step = self.plan(batch)
                if not step.num_sequences:
                    continue
                lr = self.next_lr
                steps.add(*self.take_step(step.micro_batches, partial(self.part, step, batch), self.sums))
        measured = {**self.metrics(steps.sums), "grad_norm": steps.grad_norm} if steps.applied else {}
        counts = {"applied_steps": float(steps.applied), "skipped_steps": float(steps.skipped)}
        return _named("train", {**measured, **counts, "lr": lr, "seconds": time.monotonic() - started})

    def evaluate(self, examples: Sequence[ExampleT]) -> dict[str, float]:
        """``eval/…``: the metrics of all examples, each counted once, and ``seconds``. Nothing changes."""
        started = time.monotonic()
        step = self.plan(examples)
        tally = StepTally(self.sums, self.rank.torch_device, self.rank.answers)
        self.engine.eval()
        with torch.no_grad():
            for micro_batch in step.micro_batches[self.rank.data_rank]:
                tally.add(self.part(step, examples, micro_batch))
        tally.reduce()
        measured = self.metrics(tally.sums) if step.num_sequences else {}
        return _named("eval", {**measured, "seconds": time.monotonic() - started})

    def part(self, step: OptimizerStep, examples: Sequence[ExampleT], micro_batch: MicroBatch) -> LossPart:
        """What a micro-batch adds to its step on these examples."""
        part = self.loss(step, [examples[i] for i in micro_batch.rows])
        return no_loss(part.loss, len(self.sums)) if micro_batch.filler else part

    @abstractmethod
    def plan(self, examples: Sequence[ExampleT]) -> OptimizerStep:
        """The micro-batches of every rank. Examples without a token to train are in none of them."""

    @abstractmethod
    def loss(self, step: OptimizerStep, examples: Sequence[ExampleT]) -> LossPart:
        """Of the examples of one micro-batch, as a share of their step's."""

    @staticmethod
    @abstractmethod
    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        """What the sums over one or more examples say."""


def trained_causal_lm(config: SupervisedConfig, path: str) -> TrainedModel:
    """A causal LM and how it is trained.

    Raises:
        TrainingError: it cannot be loaded; or ``train.aux_loss_coef`` asks for a balancing loss that it does not have.
    """
    causal_lm = load_causal_lm(config, path)
    add_adapters(causal_lm, config.ds.lora, config.train.seed)
    scorer = TokenScorer(
        causal_lm,
        config.ds.logprob_chunk,
        balance_experts=config.train.aux_loss_coef > 0,
        packs=config.ds.packing_samples,
    )
    heads = tuple(causal_lm.get_output_embeddings().parameters())
    return TrainedModel(scorer, causal_lm, heads, path, config.model, config.data.tokenizer_chat_template)


def balancing_loss(scores: TokenScores, examples: int) -> torch.Tensor:
    """A mixture of experts' balancing loss times the examples of the micro-batch; 0 where it was not wanted.

    Divided by the examples of the step it is the micro-batch's share of a mean. That mean does depend on how examples are
    cut into micro-batches: see ``objective``.
    """
    return scores.logprobs_BT.new_zeros(()) if scores.aux_loss is None else scores.aux_loss * examples


def balancing_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Its mean over the examples, unscaled; nothing where it was not wanted, for it is never 0."""
    return {"aux_loss": sums["aux_loss"] / sums["examples"]} if sums["aux_loss"] else {}


def loss_part(loss: torch.Tensor, names: Sequence[str], sums: Mapping[str, torch.Tensor | int]) -> LossPart:
    """A loss with its statistics in the order of their names."""
    values = [torch.as_tensor(sums[name], dtype=torch.float64, device=loss.device).detach() for name in names]
    return LossPart(loss, torch.stack(values))


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
