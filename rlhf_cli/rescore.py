"""``rlhf replay RUN --rescore``: another reward over a run's answers, for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlhf_cli.arguments import out
from rlhf_cli.views import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

TEXT = 120  # characters of a prompt or an answer
MEANINGS = {
    "failed_rollouts": "rollouts that failed, not scored",
    "unscored_in_run": "without a reward in the run",
    "compared": "samples with both rewards",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
    "advantage_sign_changed": "changed sides of their group's mean",
    "order_changed": "changed places within their group",
    "pairs_swapped": "pairs of a group that swapped",
}
SHARES = ("advantage_sign_changed", "order_changed", "pairs_swapped")


def rescore_here(
    run: str,
    sources: Sequence[str],
    *,
    iterations: str | None = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
    moved: int = 10,
    root: str | None = None,
    as_json: bool = False,
) -> None:
    """Run the flow in this process, and print what came of it; arguments as ``flows.rescore``."""
    from rlhf_cli.here import run_flow_here
    from rlhf_core.cluster.rescoring import plan_rescoring

    # A mistake shows before anything starts.
    plan = plan_rescoring(run, sources, root, None, iterations, name, overrides)
    report = run_flow_here(
        _flow,
        plan.store.url,
        list(sources),
        iterations=iterations,
        name=plan.name,
        overrides=list(overrides),
        moved=moved,
    )
    if as_json:
        out.print_json(json.dumps(report, ensure_ascii=False))
    else:
        show_report(out, report)


def show_report(out: Console, report: dict[str, Any]) -> None:
    """Print a comparison of rewards."""
    iterations = report["iterations"]
    title = f"run {report['run_id']}, iterations {iterations[0]}..{iterations[-1]}, rewards {report['name']}"
    out.print(title, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "run", "rescored"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("mean", "std", "min", "max"):
        table.add_row(name, _number(report["old"][name]), _number(report["new"][name]))
    out.print(table)
    for name in ("samples", *MEANINGS):
        value = f"{report[name]:.1%}" if name in SHARES and report[name] is not None else _number(report[name])
        out.print(f"{MEANINGS.get(name, name):<38}{value:>10}", markup=False)
    for reason, count in report["failures"].items():
        out.print(f"{count:>10} failed: {printable(reason)}", markup=False, soft_wrap=True)
    if report["old_normalised"]:
        out.print(
            "the run's rewards are normalised (reward.normalize_enable), the new ones are not: compare their order"
        )
    if report["moved"]:
        out.print("\nSamples that moved most (ranks among all samples, 0 lowest, 1 highest):")
        out.print(moved_table(report["moved"]))
    out.print(f"scatter plot  {report['plot']}", markup=False, soft_wrap=True)
    out.print(f"rewards       {report['storage']}", markup=False, soft_wrap=True)
    out.print(f"MLflow        {report['tracker'] or 'no tracker'}", markup=False, soft_wrap=True)


def moved_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The samples that moved most."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("old", "new", "moved", "prompt", "answer"):
        table.add_column(name, justify="right" if name in ("old", "new", "moved") else "left", overflow="fold")
    for row in rows:
        numbers = [_number(row["old"]), _number(row["new"]), f"{row['moved']:+.2f}"]
        table.add_row(*numbers, *(Text(_cut(printable(row[name]))) for name in ("prompt", "answer")))
    return table


def _flow() -> Any:
    from flows.rescore import rescore

    return rescore


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[:TEXT]}…"
