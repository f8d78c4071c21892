"""``rlhf report RUN``: one HTML page of what happened in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.arguments import Root, Run, out, run_store


def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: RUN.html in this folder; -: stdout.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    root: Root = None,
) -> None:
    """Write a run's report: curves, timeline, samples, ledger, failures, checkpoints, lineage, in one HTML file."""
    from rlhf_cli.amounts import size
    from rlhf_core.errors import ConfigError
    from rlhf_core.report import report_html

    store = run_store(run, root)
    page = report_html(store).encode()
    if output == Path("-"):
        typer.echo(page, nl=False)
        return
    target = output or Path(f"{store.run_id}.html")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {target.parent}: make it")
    target.write_bytes(page)
    out.print(f"{target} ({size(len(page))})", markup=False, soft_wrap=True)
    if show:
        typer.launch(target.absolute().as_uri())
