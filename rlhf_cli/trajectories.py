"""``rlhf trajectories``: the saved answers of one run or many, as one dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from rlhf_cli.arguments import AsJson, Root, out

Runs = Annotated[
    list[str] | None,
    typer.Argument(help="Ids below --root, URLs, or patterns such as 'digits-*'. None: every run below --root."),
]


def trajectories(
    runs: Runs = None,
    iteration: Annotated[int | None, typer.Option(help="Only the batch of this one.")] = None,
    where: Annotated[str | None, typer.Option(help="Such as \"reward < 0 and stop_reason = 'length'\".")] = None,
    order_by: Annotated[str | None, typer.Option(help='Such as "reward desc, iteration".')] = None,
    columns: Annotated[str | None, typer.Option(help="Such as run_id,prompt,answer,reward.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many rows.")] = 20,
    sql: Annotated[
        str | None, typer.Option(help="Any SELECT over the table `trajectories` instead; as many rows as it gives.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out what is missing or damaged, with a warning.")
    ] = False,
    as_json: AsJson = False,
    root: Root = None,
) -> None:
    """Readable samples of one run or many: prompt, answer, reward, log-prob summary, stop reason."""
    from rlhf_cli.views import show_table, show_trajectories
    from rlhf_core.errors import ConfigError
    from rlhf_core.storage import query_trajectories
    from rlhf_core.storage import trajectories as trajectories_of
    from rlhf_core.storage.find_run import find_runs

    stores = find_runs(runs or [], root)
    if sql is None:
        wanted = None if columns is None else [name.strip() for name in columns.split(",")]
        table = trajectories_of(stores, iteration, where, limit, wanted, order_by=order_by, skip_damaged=skip_damaged)
        show_trajectories(out, table, as_json)
        return
    if taken := [name for name, value in (("where", where), ("order-by", order_by), ("columns", columns)) if value]:
        raise ConfigError(f"--sql says everything itself: leave out --{', --'.join(taken)}")
    show_table(out, query_trajectories(stores, sql, iteration, skip_damaged=skip_damaged), as_json)
