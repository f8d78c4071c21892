"""A run that is asked to end, as by a batch system that takes its machines away.

::

    SIGUSR1 ─▶ the steps under way end ─▶ none begins ─▶ checkpoint ─▶ the flow run is cancelled, as "Stopped"

The same run id goes on from there. No automation does: whoever asked decides when.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from prefect.exceptions import CancelledRun
from prefect.logging import get_run_logger
from prefect.states import Cancelled

from rlhf_core.errors import RunStoppedError
from tasks.due import newest_version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tasks.run import AnyRun


class Stopping:
    """Whether the run of this process is asked to end. Use from one event loop."""

    def __init__(self) -> None:
        self.asked = False
        self._act: Callable[[], None] | None = None

    def ask(self) -> None:
        """Ask it."""
        self.asked = True
        if self._act is not None:
            self._act()

    def then(self, act: Callable[[], None] | None) -> None:
        """What to do once it is asked, at once if it is already; None: nothing any more."""
        self._act = act
        if self.asked and act is not None:
            act()


_HEEDING: ContextVar[Stopping | None] = ContextVar("heeding", default=None)  # of the flow above this one


@contextmanager
def heeding_signals() -> Iterator[Stopping]:
    """Within, SIGUSR1 asks the run to end. Outside it ends the process. A stage of a chain is asked with its chain."""
    above = _HEEDING.get()
    if above is not None:
        try:
            yield above
        finally:
            above.then(None)
        return
    stopping, loop = Stopping(), asyncio.get_running_loop()
    heeds = threading.current_thread() is threading.main_thread()  # no other hears of signals
    if heeds:
        loop.add_signal_handler(signal.SIGUSR1, stopping.ask)
    token = _HEEDING.set(stopping)
    try:
        yield stopping
    finally:
        _HEEDING.reset(token)
        if heeds:
            loop.remove_signal_handler(signal.SIGUSR1)


@contextmanager
def stops_with_its_child(stopping: Stopping, message: str) -> Iterator[None]:
    """Around the call of a child flow: ends before it where the run is asked to end already, and with it where the child was.

    Raises:
        RunStoppedError: with the message.
    """
    if stopping.asked:
        raise RunStoppedError(message)
    try:
        yield
    except CancelledRun as error:
        if not stopping.asked:
            raise  # somebody cancelled the child itself
        raise RunStoppedError(message) from error


async def stop_here(run: AnyRun, save: Callable[[str, int], Awaitable[Any]]) -> NoReturn:
    """Save where the run stands, with the checkpoint task of its kind.

    Raises:
        RunStoppedError: always.
    """
    version = await asyncio.to_thread(newest_version, run)
    get_run_logger().info("asked to end: saving version %d", version)
    if version:
        await save(run.run_id, version)
    raise RunStoppedError(
        f"run {run.run_id} was asked to end, and did with version {version} of {run.plan.iterations}: the same run id goes on"
    )


def stopped(error: RunStoppedError) -> Any:
    """What a flow returns that stopped: Prefect takes the state for its own, and raises ``CancelledRun`` to who called it."""
    return Cancelled(name="Stopped", message=str(error))
