"""An account as a graph: runs as boxes with their iterations, and what went into each.

::

    data, user's code ─▶ run ─▶ version ─▶ run that used it ─▶ version
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rlhf_core.lineage.ancestry import DIGITS, TRAINING, TRAJECTORIES
from rlhf_core.storage.paths import version_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.lineage.account import Account
    from rlhf_core.lineage.run_record import IterationRecord, RunRecord

Shape = Literal["run", "version", "input"]

LINES = 6  # iterations that a box lists; of more, the first and the last
WIDEST = 46  # characters of a line in a box
COLOURS: dict[Shape, str] = {"run": "#dbeafe", "version": "#dcfce7", "input": "#f3f4f6"}


@dataclass(frozen=True, slots=True)
class Box:
    """Something that was made or used."""

    shape: Shape
    lines: tuple[str, ...]


@dataclass
class Graph:
    """Boxes, and arrows from what went in to what came out."""

    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)  # (from, to) -> label


def graph_of(account: Account) -> Graph:
    """What the account tells, as boxes and arrows."""
    graph = Graph()
    for url, record in account.records.items():
        graph.boxes[url] = Box("run", tuple(_run_lines(record)))
        _add_inputs(graph, url, record)
    _add_models(graph, account)
    record = account.record
    if record.version:
        _add_version(graph, account.origin.url, record, record.version)
    return graph


def dot(graph: Graph) -> str:
    """The graph in Graphviz's language."""
    names = {key: f"n{number}" for number, key in enumerate(graph.boxes)}
    lines = ["digraph lineage {", '  rankdir=LR; node [shape=box, style=filled, fontname="monospace", fontsize=10];']
    for key, box in graph.boxes.items():
        text = "".join(f"{_escaped(line)}\\l" for line in box.lines)
        lines.append(f'  {names[key]} [label="{text}", fillcolor="{COLOURS[box.shape]}"];')
    for (source, target), label in graph.arrows.items():
        lines.append(f'  {names[source]} -> {names[target]} [label="{_escaped(label)}"];')
    return "\n".join([*lines, "}", ""])


def _run_lines(record: RunRecord) -> Iterator[str]:
    yield f"run {record.run_id}"
    yield f"{TRAINING.get(record.kind, record.kind)}, {record.created_at}"
    revision = record.code.get("revision")
    yield f"git {_short(revision) if revision else '?'}{' + changes' if record.code.get('dirty') else ''}"
    yield f"config {_short(record.config['sha256'])}"
    whole = list(record.iterations)
    shown = whole if len(whole) <= LINES else [*whole[: LINES // 2], None, *whole[-(LINES // 2) :]]
    for iteration in shown:
        yield f"… {len(whole) - LINES // 2 * 2} more iterations" if iteration is None else _iteration_line(iteration)


def _iteration_line(record: IterationRecord) -> str:
    held = ""
    if record.stages and record.stages[0].parts:
        first, shards = record.stages[0], sum(len(stage.parts) for stage in record.stages)
        held = f" {first.rows} rows in {shards} shards ({_short(first.sha256)})"
    weights = record.weights.get("digest")
    return f"iteration {record.iteration}:{held}{f' → {_short(weights)}' if weights else ', not over'}"


def _add_inputs(graph: Graph, url: str, record: RunRecord) -> None:
    data = record.config["values"]["data"]
    names = [*(data.get("dataset") or data.get("prompt_dataset") or ())]
    fingerprint = record.data.get("fingerprint", "")
    if record.replay is None:
        key = f"data {names} {fingerprint}"
        graph.boxes[key] = Box("input", (*(_cut(name) for name in names), f"fingerprint {_short(fingerprint)}"))
        graph.arrows[key, url] = "data"
    for path, sha256 in sorted({*record.user_code.items(), *_later_code(record)}):
        key = f"code {path} {sha256}"
        graph.boxes[key] = Box("input", (_cut(path), f"sha256 {_short(sha256)}"))
        graph.arrows[key, url] = "code"


def _later_code(record: RunRecord) -> Iterator[tuple[str, str]]:
    for change in record.code_changes:
        yield from change["user_code"].items()


def _add_models(graph: Graph, account: Account) -> None:
    waiting, seen = [account.origin], set()
    while waiting:
        run = waiting.pop()
        if run.url in seen:
            continue
        seen.add(run.url)
        for model in run.models:
            label = ", ".join(model.roles)
            if model.run is None:
                key = f"model {model.url or model.spec}"
                text = (_cut(model.spec), *((model.problem,) if model.problem else ()))
                graph.boxes.setdefault(key, Box("input", text))
            elif model.roles == (TRAJECTORIES,):
                key, label = model.run.url, f"{label}: {model.spec}"
            else:
                key = _add_version(graph, model.run.url, account.records[model.run.url], model.version or 0)
            graph.arrows[key, run.url] = label
            waiting += [model.run] if model.run is not None else []


def _add_version(graph: Graph, url: str, record: RunRecord, version: int) -> str:
    """A version of a run, and the arrow to it. Returns its key."""
    key = f"{url}@{version}"
    made = next((each.weights for each in record.iterations if each.iteration == version - 1), {})
    weights = [f"{'weights' if name == 'digest' else name} {_short(value)}" for name, value in made.items()]
    graph.boxes[key] = Box("version", (f"{record.run_id} {version_name(version)}", *weights))
    graph.arrows[url, key] = ""
    return key


def _short(sha256: str) -> str:
    return sha256[:DIGITS]


def _cut(text: str) -> str:
    """The end of a long name is what tells it from others."""
    return text if len(text) <= WIDEST else f"…{text[-WIDEST + 1 :]}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
