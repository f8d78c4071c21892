"""The report of a run: one HTML file that needs nothing else, not even a network.

::

    storage ─▶ run_log ─┬▶ curves, timeline (SVG)
                        ├▶ samples (texts, thumbnails)   ─▶ page.html (Jinja, everything escaped) ─▶ one file
                        └▶ lineage, descendants

Every text of the run (an answer, a prompt, an error, a name) is untrusted: a model can write HTML. Jinja escapes all of them;
only the drawings are markup, and they escape the names that they hold.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rlhf_core import __version__
from rlhf_core.errors import RlhfError
from rlhf_core.lineage.account import account, broken_links
from rlhf_core.lineage.ancestry import TRAINING
from rlhf_core.lineage.graph import graph_of
from rlhf_core.lineage.target import Target
from rlhf_core.report.chart import number
from rlhf_core.report.curves import curves_of
from rlhf_core.report.descendants import uses_of
from rlhf_core.report.lineage_picture import lineage_svg
from rlhf_core.report.run_log import read_log
from rlhf_core.report.samples import add_reasons, cut, held_out_samples, samples_of, spread
from rlhf_core.report.timeline import duration, timeline_of
from rlhf_core.storage import worlds_in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.report.run_log import RunLog
    from rlhf_core.storage import RunStore

LEDGER_ROWS = 24  # iterations in the table; the sums are of all
MOST_REASONS = 12  # of a kind of failure
REASON = 1200  # characters of one
MOST_SAVED = 60  # checkpoints in the table
DIGITS = 12  # of a digest, that people see
MOST_BOXES = 120  # of a lineage that is drawn
SECTIONS = (
    ("curves", "Curves"),
    ("timeline", "Timeline"),
    ("samples", "Samples"),
    ("ledger", "Ledger"),
    ("failures", "Failures and retries"),
    ("checkpoints", "Checkpoints"),
    ("lineage", "Lineage"),
    ("configuration", "Configuration"),
)

# What no text may hold on a page: control characters, which are no HTML, and lone surrogates, which are no UTF-8.
_UNSPEAKABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def report_html(store: RunStore, failure: str | None = None) -> str:
    """The page of a run that exists: finished, at work, broken off or not begun.

    What cannot be read is named on the page, and left out; only run.json has to be there.

    Args:
        store: of the run.
        failure: what the run is ending with right now: its log does not say so yet.
    """
    from jinja2 import Environment, StrictUndefined

    log = read_log(store, failure)
    samples = samples_of(log)
    add_reasons(log)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(when=when, number=number, duration=duration, size=_size)
    template = environment.from_string(files("rlhf_core.report").joinpath("page.html").read_text(encoding="utf-8"))
    curves, constant = curves_of(log)
    timeline = timeline_of(log.spans)
    page = template.render(
        log=log,
        sections=SECTIONS,
        made_at=when(time.time()),
        software=__version__,
        facts=list(_facts(log)),
        packages=log.body.get("packages", {}),
        curves=curves,
        constant=constant,
        timeline=timeline,
        stages=[] if timeline is None else timeline.table,
        samples=samples,
        held_out=held_out_samples(log),
        ledgers=[(i, asdict(log.ledgers[i])) for i in spread(sorted(log.ledgers), LEDGER_ROWS)],
        ledger_total=None if log.ledger_total is None else asdict(log.ledger_total),
        balanced=all(ledger.balanced for ledger in log.ledgers.values()),
        failures=[
            (kind, counts.total(), [(cut(reason, REASON), count) for reason, count in counts.most_common(MOST_REASONS)])
            for kind, counts in log.failures.items()
        ],
        checkpoints=[asdict(saved) for saved in log.checkpoints[-MOST_SAVED:]],
        older_checkpoints=max(0, len(log.checkpoints) - MOST_SAVED),
        uses=uses_of(store),
        metrics=list(_metrics(log)),
        digits=DIGITS,
        **_lineage(log),
    )
    return _UNSPEAKABLE.sub("�", page)


def when(at: float | None) -> str:
    """An instant, for people anywhere."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _facts(log: RunLog) -> Iterator[tuple[str, str]]:
    """What stands at the top, in this order; what the log does not say is left out."""
    body, config = log.body, log.body.get("config") or {}
    yield "kind", TRAINING.get(log.kind, log.kind)
    if log.kind == "rlhf" and config:
        advantage, actor = config["algo"]["advantage"], config["actor"]
        yield "algorithm", f"{advantage['estimator']}, {actor['policy_loss_type']} loss"
        yield "episodes", _episodes(config)
        yield "pipeline", _pipeline(config, body)
    for role, model in (body.get("models") or {}).items():
        yield role if role != "policy" else "model", str(model.get("url") or model["spec"])
    data, plan = config.get("data") or {}, body.get("plan") or {}
    if data:
        listed = ", ".join(data.get("prompt_dataset") or data.get("dataset") or ())
        counts = ", ".join(f"{plan[name]} {name}" for name in ("prompts", "examples", "dropped") if plan.get(name))
        yield "data", f"{listed} ({counts})" if counts else listed
    if body.get("seed") is not None:
        yield "seed", str(body["seed"])
    planned = f" of {plan['iterations']}" if plan.get("iterations") else ""
    yield "iterations", f"{log.updated}{planned}"
    yield "started", str(body.get("created_at", "")).replace("T", " ").replace("+00:00", " UTC")
    if log.first_at is not None and log.last_at is not None:
        yield "newest stage", f"{when(log.last_at)}, {duration(log.last_at - log.first_at)} after the first"
    code = body.get("code") or {}
    if code.get("revision"):
        yield "commit", f"{code['revision']}{' with changes' if code.get('dirty') else ''}"
    if body.get("user_code"):
        yield "user code", ", ".join(f"{path} ({sha256[:DIGITS]})" for path, sha256 in body["user_code"].items())
    if machine := body.get("machine"):
        yield "controller", f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('architecture')}"
    if worlds := worlds_in_words(log.worlds):
        yield "processes", worlds
    yield "log", log.store.url


def _episodes(config: dict[str, Any]) -> str:
    train, agent = config["train"], config["agent"]
    played = train["agent_func_path"] or ", ".join(agent["tools"] or agent["command"] or agent["url"])
    environments = [name for name in config["data"]["prompt_dataset"] if name.startswith("env:")]
    return f"played by {played or ', '.join(environments)}" if played or environments else "single turn"


def _pipeline(config: dict[str, Any], body: dict[str, Any]) -> str:
    if body.get("replay"):
        first, last = body["replay"]["iterations"]
        return f"replay of iterations {first} to {last} of {body['replay']['source_url']}"
    train = config["train"]
    if not train["async_enable"]:
        return "synchronous, colocated" if train["colocate_all"] else "synchronous"
    partial = ", partial rollout" if train["partial_rollout_enable"] else ""
    return f"asynchronous, at most {train['async_queue_size']} versions behind{partial}"


def _metrics(log: RunLog) -> Iterator[tuple[str, int, str, str, str, str]]:
    """(name, points, first, newest, least, greatest)."""
    for name, series in sorted(log.series.items()):
        values = series.values
        yield name, len(values), number(values[0]), number(values[-1]), number(min(values)), number(max(values))


def _lineage(log: RunLog) -> dict[str, Any]:
    """The picture, what is wrong with it, and which keys are not at their defaults; of an old log only what it has."""
    nothing: dict[str, Any] = {"picture": None, "boxes": 0, "broken": [], "changed": {}, "config_sha256": ""}
    if not {"config", "plan", "models", "created_at"} <= log.body.keys():
        return nothing
    try:
        found = account(Target(log.store, None))
        graph = graph_of(found)
        picture = lineage_svg(graph) if len(graph.boxes) <= MOST_BOXES else None
        broken = broken_links(log.store, found.origin)
    except RlhfError as error:
        log.problems.append(f"the lineage cannot be read: {error}")
        return nothing
    return {
        "picture": picture,
        "boxes": len(graph.boxes),
        "broken": broken,
        "changed": found.record.config["changed"],
        "config_sha256": found.record.config["sha256"],
    }


def _size(of: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if of < 1024:
            return f"{of:.0f} {unit}" if unit == "B" else f"{of:.1f} {unit}"
        of /= 1024
    return f"{of:.1f} TiB"
