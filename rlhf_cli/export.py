"""``rlhf export``: a run's trajectories as a dataset for other training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlhf_cli.arguments import AsJson, Root, Run, out

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {"sft": "rlhf sft", "dpo": "rlhf dpo (or reward-model)"}


def export(
    run: Run,
    format: Annotated[
        Literal["sft", "dpo", "hf"],
        typer.Option("--format", help="sft: best answers; dpo: preference pairs; hf: every sample, every column."),
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Path or URL: .jsonl or .parquet; of hf a folder.")],
    iterations: Annotated[str | None, typer.Option(metavar="I..J", help="Only these; default: all.")] = None,
    where: Annotated[
        str | None, typer.Option(help="Over the columns of `rlhf trajectories`: \"stop_reason != 'length'\".")
    ] = None,
    rescored: Annotated[
        str | None, typer.Option(metavar="NAME", help="Choose by these rewards of `rlhf replay --rescore`.")
    ] = None,
    best: Annotated[int | None, typer.Option(help="sft: answers of each prompt; default: 1.")] = None,
    ties: Annotated[
        Literal["newest", "all", "skip"] | None,
        typer.Option(help="sft: equal rewards at the border: the newer, all, or none of that prompt; default: newest."),
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="sft: only answers with at least this reward.")] = None,
    pairs: Annotated[
        Literal["one", "all"] | None,
        typer.Option(help="dpo: of each group the best with the worst, or every pair; default: one."),
    ] = None,
    margin: Annotated[float | None, typer.Option(help="dpo: the least difference of rewards; default: any.")] = None,
    plain_prompts: Annotated[
        bool, typer.Option("--plain-prompts", help="The rendered prompt as text instead of chat messages.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Write a dataset from a run's trajectories, and beside it what it was made from (NAME.provenance.json)."""
    from rlhf_core.cluster.exporting import ExportRequest
    from rlhf_core.cluster.exporting import export as write

    request = ExportRequest(
        run=run,
        format=format,
        output=output,
        iterations=iterations,
        where=where,
        rescored=rescored,
        best=best,
        ties=ties,
        min_reward=min_reward,
        pairs=pairs,
        margin=margin,
        plain_prompts=plain_prompts,
        overwrite=overwrite,
        root=root,
    )
    with out.status("exporting"):
        written = write(request)
    if as_json:
        out.print_json(json.dumps(written, ensure_ascii=False))
    else:
        show_export(out, written)


def show_export(out: Console, written: dict[str, Any]) -> None:
    """Print what was written, what was left out, and how to train on it."""

    def line(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    line(f"{written['rows']} rows from {written['samples']} samples: {written['output']}")
    for reason, count in written["left_out"].items():
        line(f"  {count} {reason}")
    if written["truncated"]:
        line(
            f"  {written['truncated']} of {written['answers']} answers were cut off at a limit, and training makes them end "
            "there: leave them out with --where \"stop_reason not in ('length', 'context_full')\""
        )
    if written["same_tokens"] < written["answers"]:
        line(
            f"  {written['same_tokens']} of {written['answers']} answers become the sampled tokens again; the others are other "
            "tokens of the same text"
        )
    if written["format"] in COMMANDS:
        template = str(written["messages"]).lower()
        line(
            f"train on it: {COMMANDS[written['format']]} -c FILE data.dataset={written['output'].removeprefix('file://')} "
            f"data.apply_chat_template={template}"
        )
