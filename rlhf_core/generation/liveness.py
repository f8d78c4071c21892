"""Waiting for a vLLM engine that may die meanwhile: a call to its core process is then never answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable

LOOK_SECONDS = 0.5


async def while_alive(llm: Any, call: Awaitable[Any]) -> Any:
    """The answer to ``call``, a request to ``llm`` (vLLM's AsyncLLM).

    Raises:
        WorkerError: the engine died before it answered.
    """
    waiting = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({waiting}, timeout=LOOK_SECONDS))[0]:
            if llm.errored:
                raise WorkerError("the vLLM engine died before it answered")
        return waiting.result()
    finally:
        waiting.cancel()
