"""A rollout engine in its own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.errors import WorkerError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.generation.engine import Outcome, VllmEngine
    from rlhf_core.records import GenerateRequest
    from rlhf_core.weights import WeightUpdate

logger = get_logger(__name__)


class EngineWorker:
    """Async Ray actor around one ``VllmEngine``."""

    def __init__(self, context: WorkerContext, index: int) -> None:
        context.enter(f"engine-{index}")
        self._context = context
        self._engine: VllmEngine | None = None

    async def start(self) -> int:
        """Load the model as it was before training. Returns the policy version: 0."""
        # Here, not above: the controller loads this module too.
        from rlhf_core.generation.engine import VllmEngine
        from rlhf_core.generation.settings import EngineSettings

        if self._engine is None:
            config = self._context.config
            model = self._context.model("policy")
            engine = VllmEngine(EngineSettings.from_config(config, model, self._context.device))
            await engine.start(version=0)
            self._engine = engine
        return self._engine.version

    async def generate_stream(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Chunks of finished completions: (index in ``requests``, result)."""
        async for chunk in self._running.generate_many(requests):
            yield chunk

    async def version(self) -> int:
        """The policy version the engine speaks with; -1 if it is not started, has died inside, or holds damaged weights."""
        if self._engine is None:
            return -1
        try:
            await self._engine.check_health()
        except WorkerError as error:
            logger.warning("%s", error)
            return -1
        return self._engine.version

    async def drop_requests(self) -> None:
        """End what an earlier rollout left in flight: nobody waits for it any more."""
        await self._running.drop_requests()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Meet the training ranks (nccl, ipc)."""
        await self._running.init_weight_transfer(init_info)

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take a new policy version. Returns it."""
        await self._running.update_weights(update)
        return self._running.version

    async def shutdown(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            await self._engine.shutdown()
            self._engine = None

    @property
    def _running(self) -> VllmEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not started: call start() first")
        return self._engine
