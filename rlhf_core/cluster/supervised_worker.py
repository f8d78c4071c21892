"""The processes of a model that learns from given examples: SFT, reward models, DPO.

Every rank holds all examples and takes its share of each step by the plan: nothing is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.rank_worker import TrainedWorker
from rlhf_core.data import held_out_examples, load_tokenizer, supervised_examples
from rlhf_core.records import PromptCursor
from rlhf_core.telemetry import at, in_stage

if TYPE_CHECKING:
    from rlhf_core.cluster.context import SupervisedContext
    from rlhf_core.cluster.rank_worker import Seat
    from rlhf_core.data import PromptOrder, SupervisedDataset
    from rlhf_core.training.supervised import SupervisedTrainer  # noqa: F401  what the base class is of


@dataclass(frozen=True, slots=True)
class ExampleFacts:
    """What the run's examples are."""

    examples: int  # of one epoch
    dropped: int  # overlong
    held_out: int
    fingerprint: str  # of every example: a resumed run must see the same


class SupervisedWorker(TrainedWorker["SupervisedTrainer[Any]"]):
    """Ray actor around one rank."""

    def __init__(self, context: SupervisedContext, rank: int) -> None:
        super().__init__(context, "model", rank)
        self._context, self._config = context, context.config
        self._examples: SupervisedDataset[Any] | None = None
        self._held_out: SupervisedDataset[Any] | None = None
        self._order: PromptOrder | None = None

    def load(self) -> ExampleFacts:
        """Read and tokenise the examples, where that is not done."""
        examples, order = self._loaded
        return ExampleFacts(
            examples=order.size,
            dropped=examples.overlong,
            held_out=len(self._held_out or ()),
            fingerprint=examples.fingerprint(),
        )

    def start(self, seat: Seat, total_steps: int) -> int:
        """Load examples and model, as it was before training. Returns its version: 0 if it was not started before."""
        from rlhf_core.training.methods import make_trainer

        _ = self._loaded  # every rank at the same time, and none in the middle of a step
        if self._trainer is None:
            models = {role: self._context.model(role) for role in self._context.models}
            self._trainer = make_trainer(self._context.method, self._config, models, self._join(seat), total_steps)
        return self._trainer.version

    def train(self, first_step: int, steps: int) -> dict[str, float]:
        """Optimizer steps ``first_step …`` of the run; the version goes up by one. Returns metrics, the same on every rank."""
        iteration = first_step // self._config.train.steps_per_iteration
        with at(stage="update", iteration=iteration):
            return self._train(first_step, steps)

    def _train(self, first_step: int, steps: int) -> dict[str, float]:
        examples, order = self._loaded
        size = self._config.train.batch_size
        batches = [
            [examples[index] for index in order.draw(_cursor(order.size, size, step), size)[0]]
            for step in range(first_step, first_step + steps)
        ]
        return _finite(self._running.train_steps(batches))

    @in_stage("evaluate")
    def evaluate(self) -> dict[str, float]:
        """Metrics of the held-out examples, the same on every rank."""
        return _finite(self._running.evaluate(list(self._held_out or ())))

    @property
    def _loaded(self) -> tuple[SupervisedDataset[Any], PromptOrder]:
        if self._examples is None or self._order is None:
            config = self._config
            tokenizer = load_tokenizer(
                self._context.model("policy"),
                trust_remote_code=config.run.trust_remote_code,
                use_fast=not config.data.disable_fast_tokenizer,
            )
            self._held_out = held_out_examples(config, self._context.method, tokenizer)
            self._examples = supervised_examples(config, self._context.method, tokenizer)
            self._order = self._examples.order(config.train.seed, config.data.probs)
        return self._examples, self._order


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """The last step of an epoch may be short; none crosses into the next."""
    return math.ceil(examples / batch_size)


def _cursor(examples: int, batch_size: int, step: int) -> PromptCursor:
    """Where an optimizer step of the run begins."""
    epoch, within = divmod(step, steps_per_epoch(examples, batch_size))
    return PromptCursor(epoch, within * batch_size)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
