"""The report of a run, with the tracker when the run ends: a page for people, which no run fails or waits long for."""

from __future__ import annotations

import asyncio

from prefect.artifacts import acreate_link_artifact

from rlhf_core.lineage import NoTracker
from rlhf_core.telemetry import get_logger
from tasks.report import artifact_key
from tasks.run import current_any_run

logger = get_logger(__name__)

REPORT_SECONDS = 120.0  # that making and sending it may take; `rlhf report` makes it at any time


async def attach_report(run_id: str, failure: str | None = None) -> None:
    """Make it from the log, give it to the tracker, and link it in Prefect's UI. What does not work is a warning.

    Args:
        run_id: of the open run.
        failure: what the run ends with; None: it ended well.
    """
    run = current_any_run(run_id)
    if isinstance(run.tracker, NoTracker):
        return

    def attach() -> str | None:
        from rlhf_core.report import report_html  # takes a second

        return run.tracker.log_report(report_html(run.store, failure))

    try:
        url = await asyncio.wait_for(asyncio.to_thread(attach), REPORT_SECONDS)
        if url is not None:
            await acreate_link_artifact(
                url, link_text="report", key=artifact_key(run_id, "report"), description=f"Report of run {run_id}"
            )
    except Exception as error:  # noqa: BLE001  of whatever kind: the run has ended, and its log is whole
        logger.warning("no report with the tracker: %s; make it with: rlhf report %s", error, run.store.url)
