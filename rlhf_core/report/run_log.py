"""Everything of a run that its report shows, read from its log once: documents only, no shards.

::

    run.json, worlds, attempts, lease ─▶ who, when, how it ended
    stage manifests, syncs            ─▶ series by metric, spans of time, ledgers, counts of failures
    evaluations, checkpoints          ─▶ series by metric, spans of time, versions

Documents are read in parallel and forgotten one by one: what stays is a few numbers an iteration.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_core.errors import RlhfError
from rlhf_core.records import Ledger, Stage
from rlhf_core.redaction import redact
from rlhf_core.storage import holder, read_attempts, read_worlds
from rlhf_core.storage.attempts import SYNC
from rlhf_core.storage.audit.contents import documents
from rlhf_core.storage.checkpoints import MARKER
from rlhf_core.storage.find_run import BY_REWARDS
from rlhf_core.storage.paths import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.storage import Attempt, RunStore, World

Status = Literal["finished", "running", "failed", "stopped"]

# In the order of an iteration; the manifests call ``advantage`` "experience".
STAGES = ("rollout", "reward", "advantage", "update", "sync", "evaluate", "checkpoint")
MOST_KINDS = 200  # of failures that are told apart: messages may hold a number each

_EVALUATION = re.compile(r"eval/v(?P<version>\d{8,})\.json")
_CHECKPOINT = re.compile(rf"checkpoints/v(?P<version>\d{{8,}})/{re.escape(MARKER)}")


class Span(NamedTuple):
    """When a stage of an iteration was at work; unix seconds."""

    stage: str  # one of STAGES
    iteration: int
    start: float
    end: float


@dataclass(slots=True)
class Series:
    """A metric over iterations (of evaluations: over versions)."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """One more point."""
        self.steps.append(step)
        self.values.append(value)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is there."""

    version: int
    bytes: int
    digest: str
    saved_at: float | None  # unix seconds


@dataclass(slots=True)
class RunLog:
    """See the module."""

    store: RunStore
    body: dict[str, Any]  # of run.json
    series: dict[str, Series] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    ledger_total: Ledger | None = None
    failures: dict[str, Counter[str]] = field(default_factory=dict)  # kind -> reason -> how many
    failed_rollouts: list[int] = field(default_factory=list)  # iterations with samples that failed
    scored: list[int] = field(default_factory=list)  # iterations whose answers have rewards
    begun: set[int] = field(default_factory=set)  # iterations
    updated: int = 0  # iterations whose update is recorded
    evaluation: dict[str, Any] | None = None  # the newest one
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    worlds: list[World] = field(default_factory=list)
    best: dict[str, Any] | None = None
    end: int | None = None  # the version that the run ended with
    held_by: str | None = None  # who works on it now
    failure: str | None = None  # that it is ending with right now
    problems: list[str] = field(default_factory=list)  # what could not be read

    @property
    def kind(self) -> str:
        """rlhf, sft, reward_model or dpo."""
        return str(self.body.get("kind", BY_REWARDS))

    @property
    def status(self) -> Status:
        """How it stands."""
        if self.end is not None:
            return "finished"
        if self.failure is not None:
            return "failed"
        if self.held_by is not None:
            return "running"
        return "failed" if self.attempts and self.attempts[-1].error is not None else "stopped"

    @property
    def first_at(self) -> float | None:
        """When its first stage began; unix seconds."""
        return min((span.start for span in self.spans), default=None)

    @property
    def last_at(self) -> float | None:
        """When its newest stage ended."""
        return max((span.end for span in self.spans), default=None)

    def count_failure(self, kind: str, reason: str, times: int = 1) -> None:
        """Count something that went wrong."""
        counts = self.failures.setdefault(kind, Counter())
        counts[reason if reason in counts or len(counts) < MOST_KINDS else "others"] += times


def read_log(store: RunStore, failure: str | None = None) -> RunLog:
    """Read the log of a run that exists. What is damaged is named in ``problems``, and left out.

    ``failure``: what it is ending with right now.
    """
    log = RunLog(store, store.read_run() or {}, failure=failure)
    paths = [path for folder in ("iterations", "eval", "checkpoints") for path in sorted(store.objects.list(folder))]
    wanted = [p for p in paths if any(kind.fullmatch(p) for kind in (MANIFEST, SYNC, _EVALUATION, _CHECKPOINT))]
    for document in documents(store, wanted):
        if document.body is None:
            log.problems.append(str(document.fault))
        elif found := MANIFEST.fullmatch(document.path):
            _add_stage(log, int(found["iteration"]), Stage(found["stage"]), document.body["body"])
        elif found := SYNC.fullmatch(document.path):
            _add_span(log, "sync", int(found["iteration"]), document.body)
        elif found := _EVALUATION.fullmatch(document.path):
            _add_evaluation(log, int(found["version"]), document.body)
        elif found := _CHECKPOINT.fullmatch(document.path):
            _add_checkpoint(log, int(found["version"]), document.body)
    log.spans.sort(key=lambda span: span.start)
    _add_life(log)
    return log


def _add_stage(log: RunLog, iteration: int, stage: Stage, body: Mapping[str, Any]) -> None:
    log.begun.add(iteration)
    _add_span(log, "advantage" if stage is Stage.EXPERIENCE else str(stage), iteration, body)
    _add_metrics(log, iteration, body.get("metrics", {}))
    metrics = body.get("metrics", {})
    match stage:
        case Stage.ROLLOUT:
            if failed := int(metrics.get("rollout/failed", 0)):
                log.failed_rollouts.append(iteration)
                log.count_failure("samples that failed in the rollout", "counted", failed)
            if resumed := int(body.get("resumed_groups", 0)):
                log.count_failure("groups found published by an earlier attempt", "not sampled again", resumed)
            if requeued := int(metrics.get("staleness/requeued_groups", 0)):
                log.count_failure("groups that became too old and were sampled again", "rollout.max_age", requeued)
        case Stage.REWARD:
            log.scored.append(iteration)
            for reason, count in body.get("failures", {}).items():
                log.count_failure("samples without a reward", reason, int(count))
        case Stage.EXPERIENCE:
            if "ledger" in body:
                log.ledgers[iteration] = account = Ledger(**body["ledger"])
                log.ledger_total = account if log.ledger_total is None else log.ledger_total.then(account)
            _add_metrics(log, iteration, {"kl/coef": body.get("kl_coef") or None})
            if lost := int(metrics.get("advantage/not_finite", 0)):
                log.count_failure("samples whose log-probs or values were not finite", "left out of training", lost)
        case Stage.UPDATE:
            log.updated += 1
            if skipped := int(sum(metrics.get(f"{name}/skipped_steps", 0) for name in ("update", "critic", "train"))):
                log.count_failure("optimizer steps skipped", "loss or gradient not finite", skipped)


def _add_evaluation(log: RunLog, version: int, body: dict[str, Any]) -> None:
    _add_span(log, "evaluate", version, body)
    _add_metrics(log, version, body.get("metrics", {}))
    log.evaluation = {"version": version, **body}
    log.evaluation.pop("outcomes", None)  # one entry a held-out prompt


def _add_checkpoint(log: RunLog, version: int, body: Mapping[str, Any]) -> None:
    _add_span(log, "checkpoint", version, body)
    size = sum(entry["bytes"] for entry in body.get("files", ()))
    saved_at = body["started_at"] + body["seconds"] if "started_at" in body else None
    log.checkpoints.append(SavedCheckpoint(version, size, str(body.get("digest", "")), saved_at))


def _add_span(log: RunLog, stage: str, iteration: int, body: Mapping[str, Any]) -> None:
    if "started_at" in body:
        log.spans.append(Span(stage, iteration, body["started_at"], body["started_at"] + body["seconds"]))


def _add_metrics(log: RunLog, step: int, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if isinstance(value, int | float):
            log.series.setdefault(name, Series()).add(step, float(value))


def _add_life(log: RunLog) -> None:
    store = log.store

    def life() -> None:
        log.end, log.best = store.read_end(), store.pointer("best")
        log.worlds, log.attempts = read_worlds(store), read_attempts(store)
        held = holder(store)
        log.held_by = str(held.owner) if held is not None and not held.is_free else None

    try:
        life()
    except RlhfError as error:
        log.problems.append(str(error))
    if log.failure is not None:
        log.count_failure("attempts that ended with an error", redact(log.failure))
    for attempt in log.attempts:
        if attempt.error is not None:
            log.count_failure("attempts that ended with an error", f"{attempt.error}: {attempt.message}")
        elif attempt.ended_at is None and attempt is not log.attempts[-1]:
            log.count_failure("attempts that were killed", f"attempt {attempt.number} on {attempt.host}")
        for restart in attempt.restarts:
            log.count_failure("workers that died and were rebuilt", restart.why)
