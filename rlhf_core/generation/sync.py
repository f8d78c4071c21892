"""One weight update of one engine, step by step, each with a name and all within one limit.

::

    prepare ─▶ pause ─▶ start ─▶ load ─▶ finish ─▶ stamp ─▶ resume
    └─ an error here: ┘ └─ an error here: damaged until another update succeeds ─┘
       old weights

``prepare`` (shm) proves the new weights while generation goes on. ``pause`` keeps the requests in flight and empties
the prefix cache, which belongs to the old weights; so does the KV cache of the requests, which is computed again when they
go on, or kept for themselves alone (``kept_kv``). An engine that sleeps has neither: its weights' memory is woken instead,
and it sleeps on without its KV cache, whose memory the trainer may still need.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DeadlineError, RlhfError, WeightSyncError
from rlhf_core.generation.liveness import while_alive
from rlhf_core.generation.sleeping import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.generation.sleeping import Sleep
    from rlhf_core.weights import WeightUpdate

    Step = tuple[str, Callable[[], Awaitable[Any]]]

HARMLESS = ("prepare", "pause")  # steps after whose failure the old weights are whole
UNNEEDED_ASLEEP = ("pause", "resume")  # nothing is in flight; vLLM goes on by itself once it is awake


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """An update that did not complete."""

    error: RlhfError  # for the caller
    cause: Exception
    damaged: bool  # the weights may be part old, part new, and the engine is paused or silent


async def run_round(llm: Any, update: WeightUpdate, limit: float, *, heal: bool, sleep: Sleep) -> RoundFailure | None:
    """Bring ``llm`` (vLLM's AsyncLLM) to ``update.version`` within ``limit`` seconds; None if that worked.

    ``heal``: the weights are damaged, an earlier round may still be open: close it first.
    """
    name, done = "connect", "none"
    steps = round_steps(llm, update)
    try:
        async with asyncio.timeout(limit):
            if sleep.asleep:
                name = "wake"
                await while_alive(llm, sleep.wake(llm, WEIGHTS))
                steps = [step for step in steps if step[0] not in UNNEEDED_ASLEEP]
            if heal:
                await _close_open_round(llm)
            for name, step in steps:
                await while_alive(llm, step())
                done = name
    except TimeoutError as cause:
        message = (
            f"weight sync to version {update.version}: the engine did not answer step '{name}' within {limit:g} s "
            f"(last step done: {done}); raise vllm.sync_timeout, or restart the engine"
        )
        return RoundFailure(DeadlineError(message), cause, damaged=True)
    except Exception as cause:  # noqa: BLE001  whatever the engine says goes into the error
        damaged = heal or name not in HARMLESS
        if name == "pause" and not damaged:
            await _resume(llm, limit)
        state = "its weights are damaged until an update succeeds" if damaged else "the engine keeps its old weights"
        message = f"weight sync to version {update.version} failed at step '{name}': {cause}; {state}"
        return RoundFailure(WeightSyncError(message), cause, damaged)
    return None


async def _resume(llm: Any, limit: float) -> None:
    """Let a paused engine go on, if it still listens."""
    with contextlib.suppress(Exception):  # the error of the round matters; a dead engine shows in check_health
        await asyncio.wait_for(llm.resume_generation(), limit)


def round_steps(llm: Any, update: WeightUpdate) -> list[Step]:
    """(name, call) of what brings ``llm`` to ``update``, in order."""

    def call(method: str, **arguments: Any) -> Callable[[], Awaitable[Any]]:
        return lambda: llm.collective_rpc(method, kwargs=arguments)

    steps: list[Step] = [
        ("pause", lambda: _pause(llm)),
        ("start", call("start_weight_update")),
        ("load", call("update_weights", update_info=update.payload)),
        ("finish", call("finish_weight_update")),
        ("stamp", lambda: llm.update_weight_version(str(update.version))),
        ("resume", llm.resume_generation),
    ]
    if update.backend == "shm":
        steps.insert(0, ("prepare", call("prepare_weight_update", update_info=update.payload)))
    return steps


async def _pause(llm: Any) -> None:
    """``llm.pause_generation``, which sleeps 20 ms more, so that clients see an order of events that nobody asks for here."""
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async("keep", True)


async def _close_open_round(llm: Any) -> None:
    with contextlib.suppress(Exception):  # vLLM refuses where no round is open
        await llm.collective_rpc("finish_weight_update", kwargs={})
