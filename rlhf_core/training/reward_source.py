"""A trained reward model of this process as a ``RewardSource``, and what any such source reads of the samples of a run."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rlhf_core.data import load_tokenizer
from rlhf_core.rewards.model_source import ModelSource
from rlhf_core.rewards.model_text import TokenReader, reads_tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.config import Config
    from rlhf_core.records import RewardRequest


class LocalModelSource(ModelSource):
    """The whole reward model in this process."""

    def __init__(self, config: Config, reward: str, policy: str, device: str) -> None:
        """Load the model and two tokenizers.

        Args:
            config: of the run.
            reward: folder or hub id of the reward model.
            policy: of the policy, whose tokens the trajectories are made of.
            device: where it computes.

        Raises:
            ConfigError: a tokenizer cannot be loaded.
            TrainingError: it is no reward model.
        """
        from rlhf_core.training.reward_model import (
            RewardModel,
        )  # torch, which whoever knows of this class need not load

        model = RewardModel(
            config,
            reward,
            device=device,
            micro_batch_size=config.reward.model_micro_batch_size,
            max_len=config.reward.model_max_len,
        )
        self._thread = ThreadPoolExecutor(1, "reward-model")
        super().__init__(
            [self._in_thread(model.score)],
            token_reader(config, reward, policy, model.max_len),
            micro_batch_size=config.reward.model_micro_batch_size,
            timeout=config.reward.timeout,
            max_retries=config.reward.max_retries,
        )

    async def close(self) -> None:
        """Wait for the call under way."""
        await asyncio.to_thread(self._thread.shutdown)

    def _in_thread(self, score: Callable[[Sequence[Sequence[int]]], list[float]]) -> Any:
        async def call(rows: Sequence[Sequence[int]]) -> list[float]:
            return await asyncio.get_running_loop().run_in_executor(self._thread, score, rows)

        return call


def token_reader(config: Config, reward: str, policy: str, max_len: int) -> Callable[[RewardRequest], Sequence[int]]:
    """From samples to the token ids that a reward model reads. Loads its tokenizer and the policy's.

    Args:
        config: of the run.
        reward: folder or hub id of the reward model.
        policy: of the policy.
        max_len: the longest row the reward model reads, tokens.

    Raises:
        ConfigError: a tokenizer cannot be loaded.
    """
    of_policy, own = (_tokenizer(config, path) for path in (policy, reward))
    template = None
    if config.data.apply_chat_template:
        template = config.data.tokenizer_chat_template or of_policy.chat_template
    return TokenReader(own, max_len, takes_ids=reads_tokens_of(own, of_policy, template)).read


def _tokenizer(config: Config, path: str) -> Any:
    run, data = config.run, config.data
    return load_tokenizer(path, trust_remote_code=run.trust_remote_code, use_fast=not data.disable_fast_tokenizer)
