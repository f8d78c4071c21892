"""``rlhf lineage RUN`` and ``rlhf lineage verify RUN``: where a model comes from, and whether all of it is still there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlhf_cli.amounts import count, size
from rlhf_cli.arguments import AsJson, Root, out
from rlhf_cli.progress import bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.lineage.target import Target
    from rlhf_core.storage.audit.verification import Verification

SHOW = "show"


class ShowByDefault(TyperGroup):
    """``rlhf lineage RUN`` is ``rlhf lineage show RUN``; the long form is for a run that is called like a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        if args and args[0] not in (*self.commands, "--help"):
            args = [SHOW, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ShowByDefault,
    no_args_is_help=True,
    help="Where a model comes from (`rlhf lineage RUN`), and whether all of it is still as it was recorded (`verify`).",
)

What = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT",
        help="A run id below --root or the URL of a run; RUN@12, RUN@best, RUN@latest; the URL of a checkpoint; RUN-v00000012.",
    ),
]


@app.command(SHOW)
def show(
    what: What,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as JSON.")] = False,
    graph: Annotated[
        Path | None, typer.Option("--graph", metavar="FILE", help="Draw it: .svg, .png, or .dot for Graphviz.")
    ] = None,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="With --json: also the ids of each iteration's prompts; reads the shards.")
    ] = False,
    root: Root = None,
) -> None:
    """The way from a model back to its parents: iterations, shards, prompts, code, configuration, and so on. The default."""
    from rlhf_core.lineage.account import account
    from rlhf_core.lineage.account_text import account_lines
    from rlhf_core.lineage.graph_picture import check_picture, draw_graph
    from rlhf_core.lineage.target import find_target

    if graph is not None:
        check_picture(graph)
    found = account(find_target(what, root), ids=prompts)
    if graph is not None:
        draw_graph(found, graph)
    if as_json:
        out.print_json(json.dumps(found.to_json(), ensure_ascii=False))
        return
    for line in account_lines(found):
        out.print(line, markup=False, soft_wrap=True)
    if graph is not None:
        out.print(f"\ndrawn: {graph}", markup=False, soft_wrap=True)


@app.command()
def verify(
    what: What,
    parents: Annotated[bool, typer.Option("--parents", help="The runs behind its models, too.")] = False,
    as_json: AsJson = False,
    root: Root = None,
) -> None:
    """Read everything again that the run, or what made the checkpoint, names; exit code 1 if it is missing or altered."""
    from rlhf_core.lineage.target import find_target
    from rlhf_core.storage.audit.verification import verify as verified

    target = find_target(what, root)
    results: list[Verification] = []
    gone: list[str] = []
    for each in _with_parents(target, gone) if parents else [target]:
        with bar(f"reading {each.store.run_id}") as progress:
            results.append(verified(each.store, each.version, progress))
    if as_json:
        runs = [{**asdict(result), "ok": result.ok} for result in results]
        ok = all(result.ok for result in results) and not gone
        out.print_json(json.dumps({"ok": ok, "runs": runs, "gone": gone}, ensure_ascii=False))
    else:
        for line in _lines(results, gone):
            out.print(line, markup=False, soft_wrap=True)
    if gone or not all(result.ok for result in results):
        raise typer.Exit(1)


def _with_parents(target: Target, gone: list[str]) -> Iterator[Target]:
    """The run, and each behind it at the version that was used; what is not there any more is added to ``gone``."""
    from rlhf_core.lineage import ancestry
    from rlhf_core.lineage.account import broken_links, runs_behind
    from rlhf_core.lineage.target import Target

    origin = ancestry(target.store)
    assert origin is not None, "a target is a run that exists"
    gone += broken_links(target.store, origin)
    for url, (run, version) in runs_behind(origin, target.version).items():
        yield Target(target.store.neighbour(run.run_id, url.rpartition("/")[0]), version)


def _lines(results: list[Verification], gone: list[str]) -> Iterator[str]:
    for result in results:
        for fault in result.faults:
            told = "" if fault.named_by == fault.path else f"; {fault.named_by} names it"
            yield f"{fault.kind}: {fault.path}: {fault.problem}{told}"
        what = result.url if result.version is None else f"version {result.version} of {result.url}"
        read = f"{count(result.documents, 'document')}, {count(result.objects, 'other object')}, {size(result.bytes)}"
        yield f"{'whole' if result.ok else count(len(result.faults), 'fault')}: {what} ({read})"
        if result.unnamed and result.version is None:
            yield f"besides, {count(result.unnamed)} that no document names: see rlhf gc"
    yield from gone
