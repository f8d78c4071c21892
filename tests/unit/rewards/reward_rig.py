"""Samples, user files and sources for the reward tests."""

from __future__ import annotations

import contextlib
import textwrap
from typing import TYPE_CHECKING, Any

from rlhf_core.config.model import RewardConfig
from rlhf_core.records import RewardRequest
from rlhf_core.rewards import make_reward_source
from rlhf_core.rewards.contract import FunctionSpec
from rlhf_core.rewards.function_source import FunctionSource
from rlhf_core.rewards.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from rlhf_core.rewards.source import RewardSource


def samples(answers: Sequence[str], labels: Sequence[Any] | None = None, group_size: int = 1) -> list[RewardRequest]:
    """One request per answer; every ``group_size`` of them share a group."""
    labels = [None] * len(answers) if labels is None else labels
    return [
        RewardRequest(
            query=f"Q: {answer}",
            prompt="Q: ",
            answer=answer,
            label=label,
            group_id=f"group{index // group_size}",
            sample_index=index % group_size,
            datasource="test",
        )
        for index, (answer, label) in enumerate(zip(answers, labels, strict=True))
    ]


def write_file(folder: Path, code: str, name: str = "mine.py") -> str:
    """A user's file; its path."""
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


@contextlib.asynccontextmanager
async def source_of(**config: Any) -> AsyncIterator[RewardSource]:
    """The source of a reward configuration."""
    source = make_reward_source(RewardConfig.model_validate({"num_workers": 1, "timeout": 20} | config))
    try:
        yield source
    finally:
        await source.close()


@contextlib.asynccontextmanager
async def pooled(
    use: str, *, num_workers: int = 1, timeout: float = 20, batch_size: int = 32, max_retries: int = 0
) -> AsyncIterator[tuple[WorkerPool, FunctionSource]]:
    """One function, with the pool at hand."""
    pool = WorkerPool([FunctionSpec("reward.functions[0].use", use)], num_workers=num_workers, timeout=timeout)
    try:
        yield pool, FunctionSource(pool, 0, batch_size=batch_size, max_retries=max_retries)
    finally:
        await pool.close()
