"""``rlhf gc``: what of a run nobody needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf_cli.amounts import count, size
from rlhf_cli.arguments import AsJson, Root, Run, err, out, run_store
from rlhf_cli.progress import bar

if TYPE_CHECKING:
    from rlhf_core.storage import RunStore
    from rlhf_core.storage.audit.garbage import Garbage

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove what is listed.")]


def gc(run: Run, yes: Yes = False, as_json: AsJson = False, root: Root = None) -> None:
    """List what no manifest of a run names and nobody will use; with --yes remove it, and nothing else."""
    from rlhf_core.storage.audit.garbage import find_garbage, remove_garbage

    store = run_store(run, root)
    if yes:
        with bar("removing") as progress:
            garbage = remove_garbage(store, progress)
    else:
        with err.status("looking"):
            garbage = find_garbage(store)
    if as_json:
        out.print_json(json.dumps(_as_json(store, garbage, yes)))
    else:
        _show(store, garbage, yes)


def _as_json(store: RunStore, garbage: Garbage, removed: bool) -> dict[str, Any]:
    return {
        "run_id": store.run_id,
        "url": store.url,
        "removed": removed,
        "bytes": garbage.bytes,
        "garbage": [piece._asdict() for piece in garbage.pieces],
        **{name: value for name, value in asdict(garbage).items() if name != "pieces"},
    }


def _show(store: RunStore, garbage: Garbage, removed: bool) -> None:
    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    for piece in garbage.pieces:
        say(f"{size(piece.bytes):>10}  {piece.path}  ({piece.reason})")
    done = "removed" if removed else "garbage"
    say(f"{done}: {count(len(garbage.pieces))}, {size(garbage.bytes)}, of {store.url}")
    if garbage.waiting:
        held_back = f"{count(len(garbage.waiting))}, {size(sum(garbage.waiting.values()))}"
        say(f"kept: {held_back}, of stages that are not complete: the next attempt uses them")
    for path, held in garbage.unknown.items():
        say(f"{size(held):>10}  {path}  (unknown: no document names it, and it is never removed)")
    for doubt in garbage.doubts:
        say(f"nothing would be removed: {doubt}")
    if garbage.pieces and not removed and not garbage.doubts:
        say("remove it with --yes")
