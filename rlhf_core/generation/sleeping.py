"""An engine's sleep: its GPU memory is somebody else's meanwhile.

::

    awake ──begin──▶ weights and KV cache away ──wake(weights)──▶ KV cache away ──wake(kv_cache)──▶ awake, prefix cache empty
                     level 1: the weights wait in host memory
                     level 2: they are gone, and a weight update brings them back

vLLM's CPU engine has no such mode. There it stops scheduling and keeps its memory; the rest is the same, so that a run on CPU
takes the same steps as one on GPUs. Imports no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import WorkerError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection

    from rlhf_core.generation.settings import Device

Memory = Literal["weights", "kv_cache"]  # vLLM's tags
WEIGHTS: tuple[Memory, ...] = ("weights",)
MEMORY: tuple[Memory, ...] = ("weights", "kv_cache")

logger = get_logger(__name__)

# The version of an engine whose weights went in its sleep. It lives: a weight sync is all that it needs.
NO_WEIGHTS = -2

DISCARD_WEIGHTS = 2  # the level of sleep that keeps none


class Sleep:
    """What of an engine's memory is away. Whoever calls sees to it that no request is in flight.

    Args:
        level: of vLLM's sleep mode; 0: the engine was started without it.
        device: where the engine runs.
    """

    def __init__(self, level: int, device: Device) -> None:
        self._level, self._device = level, device
        self._away: list[Memory] = []
        self.lost_weights = False  # until a weight update
        if level and device == "cpu":
            logger.info("vllm.enable_sleep: vLLM's CPU engine has no sleep mode; the engine keeps its memory")

    @property
    def asleep(self) -> bool:
        """True until all memory is back."""
        return bool(self._away)

    def check_awake(self) -> None:
        """Return if the engine may generate.

        Raises:
            WorkerError: it sleeps, or has no weights.
        """
        if self._away:
            raise WorkerError(f"the engine is asleep ({' and '.join(self._away)} away): wake it up before it is asked")
        if self.lost_weights:
            raise WorkerError(
                "the engine's weights went in its sleep (vllm.sleep_level=2): send them before it is asked"
            )

    async def begin(self, llm: Any) -> None:
        """Free the memory that is not away yet, and forget what the old weights made of earlier prompts and images."""
        if not self._level:
            raise WorkerError("the engine was started without vllm.enable_sleep: it cannot sleep")
        if len(self._away) == len(MEMORY):
            return
        if self._device == "cpu":
            await llm.pause_generation(mode="abort", clear_cache=True)
        else:
            await llm.sleep(level=self._level)
        self._away = list(MEMORY)
        self.lost_weights = self.lost_weights or self._level == DISCARD_WEIGHTS

    async def wake(self, llm: Any, memory: Collection[Memory] = MEMORY) -> None:
        """Take this memory back, where it is away. vLLM schedules again once all is there."""
        waking = [part for part in self._away if part in memory]
        if not waking:
            return
        left = [part for part in self._away if part not in waking]
        if self._device == "gpu":
            await llm.wake_up(tags=waking)
        elif not left:
            await llm.resume_generation()
        self._away = left
