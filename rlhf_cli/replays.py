"""What ``rlhf replay --reproduce`` and ``--set`` do and show."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rlhf_cli.arguments import out
from rlhf_core.storage.find_run import find_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.storage import RunStore

# Metric -> column of the table, of both runs; and of the replay alone.
OF_BOTH = {"reward/mean": "reward", "update/policy_loss": "policy loss", "update/grad_norm": "gradient norm"}
OF_REPLAY = {"mismatch/effective_share": "effective"}


def reproduce_here(
    run: str, iterations: str, *, score: bool, scratch_root: str | None, keep: bool, root: str | None, as_json: bool
) -> None:
    """Do iterations again, and show what differs; exit code 1 if something does."""
    from rlhf_cli.here import run_flow_here
    from rlhf_core.cluster.replay import check_done, find_source
    from rlhf_core.config.iteration_range import parse_iterations

    source = find_run(run, root)
    find_source(source)
    check_done(source, *parse_iterations(iterations))  # a mistake shows before anything starts
    result = run_flow_here(
        _flow,
        source.url,
        "reproduce",
        iterations=iterations,
        run_id=_named(source, f"reproduce-{time.strftime('%Y%m%d-%H%M%S')}"),
        score=score,
        scratch_root=scratch_root,
        keep=keep,
    )
    if as_json:
        out.print_json(json.dumps(result))
    else:
        _show_reproduction(result)
    if not result["same"]:
        raise typer.Exit(1)


def what_if_here(
    run: str, changes: Sequence[str], iterations: str | None, *, run_id: str | None, root: str | None, as_json: bool
) -> None:
    """Train on the run's trajectories with something changed, as a run of its own, and show both side by side."""
    from rlhf_cli.here import run_flow_here
    from rlhf_core.cluster.replay import find_source, scored_iterations, storage_for
    from rlhf_core.config.iteration_range import parse_iterations
    from rlhf_core.config.replay import check_replay, replay_config

    source = find_run(run, root)
    body, sampled_with = find_source(source)
    span = None if iterations is None else parse_iterations(iterations)
    config = replay_config(
        body, source.url, storage_for(source), changes, span
    )  # a mistake shows before anything starts
    check_replay(sampled_with, config)
    scored_iterations(source, span)
    run_id = run_id or _named(source, f"replay-{time.strftime('%Y%m%d-%H%M%S')}")
    if not as_json:
        out.print(f"run {run_id}: the same command with --run-id {run_id} goes on where it stopped", soft_wrap=True)
        out.print("a replay has no engine: nothing is evaluated", soft_wrap=True)
    result = run_flow_here(_flow, source.url, "what-if", changes=list(changes), iterations=iterations, run_id=run_id)
    if as_json:
        out.print_json(json.dumps(result))
    else:
        _show_what_if(source, find_run(result["storage"], None, config.storage.options), result)


def _flow() -> Any:
    from flows.replay import replay

    return replay


def _named(source: RunStore, what: str) -> str:
    """A run id: at most 128 characters."""
    return f"{source.run_id[: 127 - len(what)]}-{what}"


def _show_reproduction(result: dict[str, Any]) -> None:
    table = Table(title=result["source"], title_justify="left", box=SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in ("iteration", "rewards", "experience", "weights"):
        table.add_column(name, justify="right" if name == "iteration" else "left")
    for row in result["iterations"]:
        table.add_row(str(row["iteration"]), row["rewards"], row["experience"], row["weights"])
    out.print(table)
    for row in result["iterations"]:
        for note in row["notes"]:
            out.print(f"iteration {row['iteration']}: {note}", markup=False, soft_wrap=True)
    if result["scratch"] is not None:
        out.print(f"scratch run: {result['scratch']}", markup=False, soft_wrap=True)
    if result["same"]:
        out.print("reproduced: every digest is the recorded one")
        return
    out.print("\nnot reproduced. Since the run was started, these have changed:" if result["changed_since"] else "")
    for line in result["changed_since"] or [
        "neither code, packages nor machine have changed since the run was started"
    ]:
        out.print(f"  {line}", markup=False, soft_wrap=True)


def _show_what_if(source: RunStore, own: RunStore, result: dict[str, Any]) -> None:
    from tasks.lineage import iteration_metrics

    replayed = (own.read_run() or {})["replay"]
    table = Table(title="source → replay", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    pairs = [
        (iteration_metrics(source, replayed["iterations"][0] + iteration), iteration_metrics(own, iteration))
        for iteration in own.completed_iterations()
    ]
    for name in ("iteration", *OF_BOTH.values(), *OF_REPLAY.values()):
        table.add_column(name, justify="right")
    for iteration, (theirs, ours) in enumerate(pairs):
        cells = [f"{_number(theirs.get(name))} → {_number(ours.get(name))}" for name in OF_BOTH]
        cells += [_number(ours.get(name)) for name in OF_REPLAY]
        table.add_row(str(replayed["iterations"][0] + iteration), *cells)
    out.print(table)
    out.print(f"run           {result['storage']}   (version {result['version']})", markup=False, soft_wrap=True)
    out.print(f"source        {result['source']}", markup=False, soft_wrap=True)
    out.print(f"MLflow        {result['tracker'] or 'no tracker'}", markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
