"""What the commands share: options, consoles, and how a run is named on the command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

# --section.key=value, as OpenRLHF users write it, is an override like section.key=value.
OPENRLHF_FLAGS = {"ignore_unknown_options": True}

ConfigFile = Annotated[str, typer.Option("--config", "-c", help="A YAML file, or the name of one in configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, on top of the file.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Names the run; the same id again resumes.")]
Resume = Annotated[Literal["must", "if-present", "never"], typer.Option("--resume", help="Whether it has to exist.")]
Run = Annotated[str, typer.Argument(help="A run id below --root, or the URL of a run.")]
Root = Annotated[str | None, typer.Option("--root", help="storage.root of the run, if it is not the default.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def run_store(run: str, root: str | None) -> Any:
    """The log of a run named by id or URL."""
    from rlhf_core.storage.find_run import find_run

    return find_run(run, root)
