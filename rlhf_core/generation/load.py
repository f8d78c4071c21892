"""What an engine has to do right now, by vLLM's own statistics of each step.

Kept only in a run that somebody watches: vLLM counts for it in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class EngineLoad:
    """The newest step, and a count since the start."""

    running: int = 0  # requests
    waiting: int = 0
    kv_cache_usage: float = 0.0  # share that is taken
    tokens: int = 0  # sampled since the start


def load_keeper(load: EngineLoad) -> Any:
    """A factory of vLLM's stat loggers, which keep ``load`` up to date."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Keeper(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                load.running, load.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
                load.kv_cache_usage = scheduler_stats.kv_cache_usage
            if iteration_stats is not None:
                load.tokens += iteration_stats.num_generation_tokens

        def log_engine_initialized(self) -> None:
            pass

    return Keeper
