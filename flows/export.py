"""A dataset from the trajectories of a run: best answers, preference pairs, or everything."""

from __future__ import annotations

from typing import Any, Literal

from prefect import flow

from tasks.export import write_dataset


@flow(name="rlhf", persist_result=False)
async def export(
    run: str,
    format: Literal["sft", "dpo", "hf"],
    output: str,
    iterations: str | None = None,
    where: str | None = None,
    rescored: str | None = None,
    best: int | None = None,
    ties: Literal["newest", "all", "skip"] | None = None,
    min_reward: float | None = None,
    pairs: Literal["one", "all"] | None = None,
    margin: float | None = None,
    plain_prompts: bool = False,
    overwrite: bool = False,
    root: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a dataset.

    Args:
        run: Its URL, or its id below root.
        format: sft - best answers; dpo - preference pairs; hf - every sample with every column.
        output: Path or URL; .jsonl or .parquet, of hf a folder.
        iterations: First..last; all by default.
        where: Over the columns of rlhf trajectories.
        rescored: Name of the rescored rewards that count instead of the run's own.
        best: Of sft - answers of each prompt, 1 by default.
        ties: Of sft - what becomes of equal rewards at the border.
        min_reward: Of sft - the least reward.
        pairs: Of dpo - of each group the best with the worst, or every pair.
        margin: Of dpo - the least difference of rewards.
        plain_prompts: The rendered prompt as text instead of chat messages.
        overwrite: Replace an earlier export.
        root: storage.root of the run, if run is an id.
        storage_options: Of the file system, such as the endpoint of an S3 server.
    """
    return await write_dataset(
        {
            "run": run,
            "format": format,
            "output": output,
            "iterations": iterations,
            "where": where,
            "rescored": rescored,
            "best": best,
            "ties": ties,
            "min_reward": min_reward,
            "pairs": pairs,
            "margin": margin,
            "plain_prompts": plain_prompts,
            "overwrite": overwrite,
            "root": root,
            "storage_options": storage_options or {},
        }
    )
