"""What the flows of all kinds of run do with an open run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from prefect.logging import get_run_logger

from flows.stopping import stopped
from rlhf_core.errors import RunStoppedError
from tasks.due import newest_version
from tasks.lineage import tell_failure, track
from tasks.report import link_tracker
from tasks.run_report import attach_report

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tasks.run import AnyRun


async def carry_out(run: AnyRun, iterate: Callable[[], Awaitable[None]], **also: Any) -> dict[str, Any]:
    """Run every iteration, keep the tracker informed, and record the end. Returns what the flow does: of a run
    that was asked to end, its state.

    Args:
        run: open.
        iterate: everything that its log says is not done yet.
        also: what the result of a finished run says besides.
    """
    get_run_logger().info("log of the run: %s", run.store.url)
    await link_tracker(run.run_id, await track(run.run_id))
    try:
        await iterate()
    except RunStoppedError as error:
        await track(run.run_id, leaving=True)
        return cast("dict[str, Any]", stopped(error))
    except Exception as error:
        await tell_failure(run.run_id)
        await attach_report(run.run_id, f"{type(error).__name__}: {error}")
        raise
    await track(run.run_id, insist=True)
    version = await asyncio.to_thread(newest_version, run)
    run.session.check_lease()
    await asyncio.to_thread(run.store.write_end, version)
    await attach_report(run.run_id)
    return {"run_id": run.run_id, "storage": run.store.url, "tracker": run.tracker.url, "version": version, **also}
