"""The steps of a retraining's turn: begin, record the prompts, compare, decide, carry out.

Each returns at once where the log says that it is done. A decision is recorded before it is carried out, and carried out again
until the log says that it was: a process that dies in between promotes nothing twice and forgets nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.logging import get_run_logger

from rlhf_core.data.row_list import row_ids
from rlhf_core.errors import StorageError
from rlhf_core.storage import CheckpointStore
from rlhf_core.storage.drawn import drawn_rows
from rlhf_core.storage.lease_renewal import require
from rlhf_core.storage.retrain_log import TurnRecord
from tasks.comparison import Comparison, compared, decision_markdown
from tasks.options import TASK_OPTIONS
from tasks.report import artifact_key
from tasks.retraining import check_turn, incumbent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.lineage import ModelVersion
    from tasks.approval import Answer
    from tasks.retraining import Retraining


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn to work on; or none, where too few prompts are new."""

    turn: TurnRecord | None
    new: int  # prompts
    total: int


@task(name="begin turn", **TASK_OPTIONS)
async def begin_turn(retraining: Retraining, flow_run_id: str) -> Begun:
    """The turn that this flow run began, else the open one, else a new one.

    Raises:
        ConfigError: the turn cannot go on, or the champion cannot be loaded.
        DataError: the prompts cannot be read.
    """
    return await asyncio.to_thread(_begin, retraining, flow_run_id)


@task(name="record prompts", task_run_name="record prompts of turn {turn.number}", **TASK_OPTIONS)
async def record_prompts(retraining: Retraining, turn: TurnRecord) -> int:
    """Record which prompts the turn's run has sampled: they are not new any more. Returns how many."""
    drawn = await asyncio.to_thread(drawn_rows, retraining.run_store(turn))
    require(retraining.lease)
    await asyncio.to_thread(retraining.log.write_drawn, turn.number, drawn)
    return len(drawn)


@task(name="compare", task_run_name="compare turn {turn.number}", **TASK_OPTIONS)
async def compare(retraining: Retraining, turn: TurnRecord) -> Comparison:
    """Champion and challenger; errors as ``compared``."""
    comparison = await asyncio.to_thread(compared, retraining, turn)
    get_run_logger().info("turn %d: %s", turn.number, comparison.sentence)
    return comparison


@task(name="decide", task_run_name="decide turn {turn.number}", **TASK_OPTIONS)
async def decide(retraining: Retraining, turn: TurnRecord, comparison: Comparison, answer: Answer | None) -> None:
    """Record what becomes of the challenger. Where there is a decision, that one stays."""
    if await asyncio.to_thread(retraining.log.decision, turn.number) is None:
        body = await asyncio.to_thread(_decision, retraining, turn, comparison, answer)
        require(retraining.lease)
        await asyncio.to_thread(retraining.log.write_decision, turn.number, body)


@task(name="carry out", task_run_name="carry out turn {turn.number}", **TASK_OPTIONS)
async def carry_out_decision(retraining: Retraining, turn: TurnRecord) -> dict[str, Any]:
    """Move the alias, write the verdict on the version, and show both. Returns the decision."""
    body = await asyncio.to_thread(retraining.log.decision, turn.number)
    assert body is not None, "a turn is decided before it is carried out"
    if not await asyncio.to_thread(retraining.log.is_over, turn.number):
        require(retraining.lease)
        if body["verdict"] != "abandoned":
            await _announce(retraining, body)
        await asyncio.to_thread(retraining.log.settle, turn.number)
    get_run_logger().info("turn %d: %s: %s", turn.number, body["verdict"], body["reason"])
    return body


def _begin(retraining: Retraining, flow_run_id: str) -> Begun:
    log = retraining.log
    found = log.begun_by(flow_run_id) or log.open_turn()
    if found is not None:
        if log.decision(found.number) is None:
            check_turn(retraining, found)
        return Begun(found, found.row_count, found.row_count)
    rows = list(row_ids(retraining.training.data))
    new = set(rows) - log.seen()
    if len(new) < retraining.config.min_new_prompts:
        return Begun(None, len(new), len(rows))
    start, start_from, start_version = incumbent(retraining)
    number = max(log.numbers(), default=0) + 1
    require(retraining.lease)
    turn = TurnRecord(
        number=number,
        run_id=f"{retraining.config.name}-{number:04d}",
        flow_run_id=flow_run_id,
        start=start,
        start_from=start_from,
        start_version=start_version,
        rows=log.write_rows(number, new),
        row_count=len(new),
        created_at=_now(),
    )
    check_turn(retraining, turn)
    log.begin(turn)
    return Begun(turn, len(new), len(rows))


def _decision(
    retraining: Retraining, turn: TurnRecord, comparison: Comparison, answer: Answer | None
) -> dict[str, Any]:
    challenger = _registered(retraining, turn, comparison.challenger_version)
    verdict, reason = _verdict(retraining, turn, comparison, answer)
    return {
        "turn": turn.number,
        "run_id": turn.run_id,
        "verdict": verdict,
        "reason": reason,
        "metric": comparison.metric,
        "margin": retraining.config.margin,
        "standard_errors": retraining.config.standard_errors,
        "champion": {"model": turn.start, "found_as": turn.start_from, "version": turn.start_version},
        "challenger": {
            "model": challenger.checkpoint.spec,
            "version": challenger.number,
            "digest": challenger.checkpoint.digest,
        },
        "numbers": asdict(comparison.numbers),
        "left_out": comparison.left_out,
        "approval": None if answer is None else answer.to_json(),
        "decided_at": _now(),
    }


def _verdict(
    retraining: Retraining, turn: TurnRecord, comparison: Comparison, answer: Answer | None
) -> tuple[str, str]:
    """(verdict, reason)."""
    if not comparison.better:
        return "refused", comparison.sentence
    if answer is not None and not answer.approved:
        return "refused", f"{answer.reason}; {comparison.sentence}"
    found = retraining.registry.version("champion")
    champion = None if found is None else found.number
    if champion != (turn.start_version if turn.start_from == "champion" else None):
        who = "to none" if champion is None else f"to version {champion}"
        return "refused", f"the champion changed during the turn, {who}; {comparison.sentence}"
    return "promoted", comparison.sentence


def _registered(retraining: Retraining, turn: TurnRecord, version: int) -> ModelVersion:
    checkpoints = CheckpointStore(retraining.run_store(turn))
    body = checkpoints.get(version)
    found = None if body is None else retraining.registry.find(checkpoints.url(version), body["digest"])
    if found is None:
        raise StorageError(
            f"{checkpoints.url(version)} is no version of registered model {retraining.config.model!r}: it was deleted there; "
            "give the turn up (rlhf retrain -c FILE --abandon)"
        )
    return found


async def _announce(retraining: Retraining, body: Mapping[str, Any]) -> None:
    await asyncio.to_thread(_tell_registry, retraining, body)
    await acreate_markdown_artifact(
        decision_markdown(retraining.config.name, body, retraining.registry.url),
        key=artifact_key(retraining.config.name, "decision"),
        description=f"Turn {body['turn']} of retraining {retraining.config.name}: {body['verdict']}",
    )


def _tell_registry(retraining: Retraining, body: Mapping[str, Any]) -> None:
    numbers, number = body["numbers"], int(body["challenger"]["version"])
    if body["verdict"] == "promoted":
        retraining.registry.promote(number)
    error = numbers["standard_error"]
    tags = {
        "verdict": str(body["verdict"]),
        "reason": str(body["reason"]),
        "turn": f"{retraining.config.name} {body['turn']}",
        "compared_with": str(body["champion"]["model"]),
        "difference": f"{numbers['difference']:.6g}",
        "standard_error": "" if error is None else f"{error:.6g}",
        "decided_at": str(body["decided_at"]),
    }
    retraining.registry.tag(number, {f"retrain.{name}": value for name, value in tags.items()})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
