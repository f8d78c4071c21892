"""A dataset from the trajectories of a run."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact

from rlhf_core.cluster.exporting import ExportRequest, export
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key


@task(name="export", task_run_name="export {request[run]}", **TASK_OPTIONS)
async def write_dataset(request: dict[str, Any]) -> dict[str, Any]:
    """Write it, and show what it holds. Returns what it was made from.

    Args:
        request: the fields of ``ExportRequest``.
    """
    written = await asyncio.to_thread(export, ExportRequest(**request))
    counts = {name: written[name] for name in ("rows", "samples", "answers", "truncated", "same_tokens")}
    left_out = {f"left out, {reason}": count for reason, count in written["left_out"].items()}
    await acreate_table_artifact(
        key=artifact_key(written["source"]["run_id"], f"export-{written['format']}"),
        table=[{"what": what, "count": count} for what, count in {**counts, **left_out}.items()],
        description=f"{written['output']}, from run {written['source']['url']}",
    )
    return {name: written[name] for name in ("output", "rows", "samples", "left_out")}
