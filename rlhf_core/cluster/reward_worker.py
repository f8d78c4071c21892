"""The processes that hold a trained reward model, each the whole of it; and the reward source made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.wait import PROCESS_GONE
from rlhf_core.errors import WorkerError
from rlhf_core.rewards.model_source import ModelSource
from rlhf_core.training.reward_source import token_reader

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.training.reward_model import RewardModel


class RewardModelWorker:
    """Ray actor around one copy of the reward model."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        context.enter(f"reward-{rank}")
        self._context = context
        self._model: RewardModel | None = None

    def ping(self) -> None:
        """Answer."""

    def start(self) -> int:
        """Load the model, if it is not loaded. Returns the longest row it reads, tokens."""
        from rlhf_core.training.reward_model import RewardModel  # torch, which the controller must not load

        if self._model is None:
            reward = self._context.config.reward
            self._model = RewardModel(
                self._context.config,
                self._context.model("reward"),
                device="cuda" if self._context.device == "gpu" else "cpu",
                micro_batch_size=reward.model_micro_batch_size,
                max_len=reward.model_max_len,
            )
        return self._model.max_len

    def offload(self) -> None:
        """See ``RewardModel.offload``; nothing where it is not loaded yet."""
        if self._model is not None:
            self._model.offload()

    def reload(self) -> None:
        """See ``RewardModel.reload``; nothing where it is not loaded yet."""
        if self._model is not None:
            self._model.reload()

    def score(self, rows: list[list[int]]) -> list[float]:
        """One score a row of token ids."""
        if self._model is None:
            raise RuntimeError("the reward model is not started: call start() first")
        return self._model.score(rows)


def model_source(context: WorkerContext, ranks: Sequence[Any], max_len: int) -> ModelSource:
    """The reward source over the ranks. Loads two tokenizers: that of the reward model, and that of the policy.

    Raises:
        ConfigError: they cannot be loaded.
    """
    config = context.config
    return ModelSource(
        [_scorer(rank) for rank in ranks],
        token_reader(config, context.model("reward"), context.model("policy"), max_len),
        micro_batch_size=config.reward.model_micro_batch_size,
        timeout=config.reward.timeout,
        max_retries=config.reward.max_retries,
    )


def _scorer(rank: Any) -> Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[float]]]:
    async def score(rows: Sequence[Sequence[int]]) -> Sequence[float]:
        try:
            return await rank.score.remote([list(row) for row in rows])  # type: ignore[no-any-return]
        except PROCESS_GONE as error:
            raise WorkerError(f"a reward model died while scoring: {error}") from error

    return score
