"""The requests of one call of ``generate_many`` while vLLM has them, and what becomes of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DeadlineError, GenerationError
from rlhf_core.records import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import GenerateRequest

Outcome = Generation | GenerationError | DeadlineError
Chunk = list[tuple[int, Outcome]]  # (position in the batch, what became of it)


class Mailbox:
    """Where vLLM's output loop puts the finished outputs of a batch, in place of one queue and one task a request."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._ready = asyncio.Event()

    def put(self, output: Any) -> None:
        """A finished ``RequestOutput``, or the exception that ended the engine."""
        self._outputs.append(output)
        self._ready.set()

    async def take(self, limit: float) -> list[Any]:
        """All that came since the last call, at least one; nothing after ``limit`` seconds without any."""
        try:
            await asyncio.wait_for(self._ready.wait(), limit)
        except TimeoutError:
            return []
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


@dataclass(slots=True)
class Pending:
    """A request that vLLM has."""

    index: int  # in the batch
    budget: int  # tokens it may sample
    internal_id: str  # vLLM's


@dataclass(slots=True)
class Batch:
    """Requests that were asked for together."""

    requests: Sequence[GenerateRequest]
    mailbox: Mailbox = field(default_factory=Mailbox)
    pending: dict[str, Pending] = field(default_factory=dict)  # by the name vLLM knows the request under
    refused: Chunk = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)  # positions in the batch: nobody waits for them
    rendered: dict[int, dict[str, Any]] = field(default_factory=dict)  # by position, where the model reads images
