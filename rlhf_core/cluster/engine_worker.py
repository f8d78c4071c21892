"""A rollout engine in its own process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_core.cluster.address import node_id, use_node_address
from rlhf_core.cluster.image_intake import check_image_processor
from rlhf_core.cluster.images import image_loader
from rlhf_core.cluster.weight_relay import delete, write_pieces
from rlhf_core.errors import WorkerError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rlhf_core.cluster.context import WorkerContext
    from rlhf_core.generation.batch import Outcome
    from rlhf_core.generation.engine import VllmEngine
    from rlhf_core.generation.load import EngineLoad
    from rlhf_core.generation.serving.server import SessionServer
    from rlhf_core.records import GenerateRequest, Session, SessionRecord, SessionRequest
    from rlhf_core.weights import WeightUpdate

logger = get_logger(__name__)


class EngineWorker:
    """Async Ray actor around one ``VllmEngine``."""

    def __init__(self, context: WorkerContext, index: int) -> None:
        context.enter(f"engine-{index}")
        self._context = context
        self._engine: VllmEngine | None = None
        self._sessions: SessionServer | None = None  # made when the first session is opened

    async def start(self) -> int:
        """Load the model as it was before training. Returns the policy version: 0."""
        use_node_address()
        # Here, not above: the controller loads this module too.
        from rlhf_core.generation.engine import VllmEngine
        from rlhf_core.generation.settings import EngineSettings

        if self._engine is None:
            config = self._context.config
            model = self._context.model("policy")
            settings = EngineSettings.from_config(config, model, self._context.device)
            engine = VllmEngine(settings, image_loader(self._context.store))
            await engine.start(version=0)
            check_image_processor(self._context.store, engine.image_processor)
            self._engine = engine
        return self._engine.version

    async def generate_stream(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Outcome]]]:
        """Chunks of finished completions: (index in ``requests``, result)."""
        async for chunk in self._running.generate_many(requests):
            yield chunk

    async def version(self) -> int:
        """The policy version the engine speaks with, asleep or not; -1 if it is not started, has died inside, or holds damaged
        weights; ``NO_WEIGHTS`` if they went in its sleep.
        """
        if self._engine is None:
            return -1
        try:
            await self._engine.check_health()
        except WorkerError as error:
            logger.warning("%s", error)
            return -1
        return self._engine.version

    async def load(self) -> EngineLoad | None:
        """What the engine has to do right now; None if it is not started."""
        return None if self._engine is None else self._engine.load

    async def sleep(self) -> None:
        """Give the GPU's memory to others; nothing where the engine sleeps already, or is not started."""
        if self._engine is not None:
            await self._engine.sleep()

    async def wake_up(self) -> None:
        """Take all memory back; nothing where the engine is awake, or is not started."""
        if self._engine is not None:
            await self._engine.wake_up()

    async def drop_requests(self) -> None:
        """End what an earlier rollout left in flight, its sessions included: nobody waits for it any more."""
        if self._sessions is not None:
            await self._sessions.close_all()
        await self._running.drop_requests()

    async def abort_requests(self, request_ids: list[str]) -> None:
        """End requests for which nobody waits any more."""
        await self._running.abort_requests(request_ids)

    async def open_session(self, request: SessionRequest) -> Session:
        """See ``AgentServer``."""
        return await self._server.open_session(request)

    async def rewards_posted(self, session_ids: list[str], seconds: float) -> list[str]:
        """Which of the sessions were given their reward with ``done``; waits so long for the first one."""
        return await self._server.rewards_posted(session_ids, seconds)

    async def close_session(self, session_id: str) -> SessionRecord:
        """See ``AgentServer``.

        Raises:
            WorkerError: the engine died: what the session holds may be cut off.
        """
        record = await self._server.close_session(session_id)
        await self._running.check_health()
        return record

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Meet the training ranks (nccl, ipc)."""
        await self._running.init_weight_transfer(init_info)

    async def node(self) -> str:
        """Ray's name of the node this engine is on."""
        return node_id()

    async def receive_weights(self, update: WeightUpdate, nbytes: int, pieces: Sequence[Any]) -> WeightUpdate:
        """See ``write_pieces``: for all engines of this node."""
        return await asyncio.to_thread(write_pieces, update, nbytes, pieces, self._context.run_id)

    async def delete_weights(self, update: WeightUpdate) -> None:
        """What ``receive_weights`` wrote."""
        delete(update)

    async def update_weights(self, update: WeightUpdate) -> int:
        """Take a new policy version. Returns it."""
        await self._running.update_weights(update)
        return self._running.version

    async def shutdown(self) -> None:
        """Stop the server and the engine."""
        if self._sessions is not None:
            await self._sessions.stop()
            self._sessions = None
        if self._engine is not None:
            await self._engine.shutdown()
            self._engine = None

    @property
    def _server(self) -> SessionServer:
        if self._sessions is None:
            import ray

            from rlhf_core.generation.serving.options import ServerOptions
            from rlhf_core.generation.serving.server import SessionServer

            reached_at = ray.util.get_node_ip_address()
            options = ServerOptions.from_config(self._context.config, self._context.model("policy"), reached_at)
            processor = self._running.image_processor
            options = replace(
                options,
                banned_ids=tuple(sorted(self._running.banned_ids)),
                image_token_id=None if processor is None else processor.image_token_id,
            )
            # Without data.max_images_per_prompt the trainer reads text only, whatever the model could see.
            store_image = None if processor is None else self._context.store.put_image
            self._sessions = SessionServer(self._running, options, store_image)
        return self._sessions

    @property
    def _running(self) -> VllmEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not started: call start() first")
        return self._engine
