"""Another reward over the saved trajectories of a run: no engine, no training.

::

    saved answers ─▶ score again ─▶ rewards, durable beside the run's own ─▶ compare ─▶ table, scatter plot, what moved most

Started again, it scores only what is missing.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from tasks.rescore import compare_rewards, score_again


@flow(name="rlhf", persist_result=False)
async def rescore(
    run: str,
    sources: list[str],
    iterations: str | None = None,
    name: str | None = None,
    overrides: list[str] | None = None,
    moved: int = 10,
    root: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a run's answers with another reward, and compare.

    Args:
        run: Its URL, or its id below root.
        sources: Built-ins, path.py:function, URLs of reward servers, a reward model; several are summed.
        iterations: First..last; all by default.
        name: Of the new rewards in the run; by default made from the sources. The same again goes on.
        overrides: reward.key=value, such as reward.timeout=5.
        moved: How many of the samples that moved most are shown.
        root: storage.root of the run, if run is an id.
        storage_options: Of the file system, such as the endpoint of an S3 server.
    """
    scored = await score_again(
        run,
        sources,
        root=root,
        options=storage_options,
        iterations=iterations,
        name=name,
        overrides=overrides or [],
    )
    return await compare_rewards(scored["run"], scored["name"], scored["iterations"], storage_options, moved)
