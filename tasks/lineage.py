"""The trackers' views of the run, brought up to date from the log.

A tracker that is away does not stop training: what it missed is told at the next call. The last call insists that MLflow takes
it; see ``telling``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.config import Config
from rlhf_core.data import models_of
from rlhf_core.lineage import BestRecord, CheckpointRecord, DatasetRecord
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, best_pointer, read_worlds, worlds_in_words
from tasks.options import TASK_OPTIONS
from tasks.registered import exported
from tasks.run import current_any_run
from tasks.supervised_run import OpenSupervisedRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.lineage import Tracker
    from rlhf_core.storage import RunStore
    from tasks.run import AnyRun
    from tasks.telling import Telling


@task(name="lineage", task_run_name="lineage", **TASK_OPTIONS)
async def track(run_id: str, insist: bool = False, leaving: bool = False) -> str | None:
    """Tell every tracker what it does not know yet. Returns the page of MLflow's run.

    Args:
        run_id: of the open run.
        insist: the run is over: what MLflow cannot be told now is an error.
        leaving: this process leaves the run before its end: those beside it take what they were not told yet, and let go.

    Raises:
        ConnectionError: MLflow did not take it, and ``insist``.
    """
    run = current_any_run(run_id)
    await asyncio.gather(
        *(
            each.tell(lambda telling: _tell(run, telling, over=insist, leaving=leaving), insist, leaving)
            for each in run.tellings
        )
    )
    return run.tracker.url


async def tell_failure(run_id: str) -> None:
    """Mark the trackers' runs as failed; a retry marks them as running again. The failure itself is what matters."""
    await asyncio.gather(*(each.tell_failure() for each in current_any_run(run_id).tellings))


def iteration_metrics(store: RunStore, iteration: int) -> dict[str, float]:
    """Every metric of an iteration, and the seconds of its stages, from the manifests."""
    metrics: dict[str, float] = {"policy_version": float(iteration + 1)}
    for stage in Stage:
        found = store.stage(iteration, stage)
        if found is None:
            continue
        body = found[0].body
        metrics.update(body.get("metrics", {}))
        metrics[f"seconds/{stage}"] = float(body["seconds"])
        if stage is Stage.EXPERIENCE:
            metrics.update({f"ledger/{name}": float(count) for name, count in body["ledger"].items()})
            metrics["kl/coef"] = float(body["kl_coef"])
    return metrics


def _tell(run: AnyRun, telling: Telling, over: bool, leaving: bool) -> None:
    """What is new since the last call; the newest version again, whose checkpoint may have come later than its update."""
    tracker, store = telling.tracker, run.store
    if not telling.started:
        _start(run, tracker)
        telling.started = True
    told = tracker.logged_iterations()
    newest = store.newest_update()
    version = 0 if newest is None else newest[0] + 1
    for earlier in range(told, version):
        _tell_version(run, tracker, earlier)
        _tell_iteration(run, tracker, earlier)
    _tell_version(run, tracker, version)
    _tell_best(run, tracker)
    _tell_deleted(run, telling)
    if over:
        tracker.finish(succeeded=True)
    elif leaving and telling.beside:  # W&B uploads what it was told at its end; MLflow has it, and its run goes on
        tracker.finish(succeeded=False)


def _start(run: AnyRun, tracker: Tracker) -> None:
    body = run.store.read_run() or {}
    code: Mapping[str, object] = body.get("code", {})
    replay: Mapping[str, object] | None = body.get("replay")
    tags = {
        "rlhf.storage": run.store.url,
        "prefect.flow_run_id": str(body.get("flow_run_id")),
        "git.revision": str(code.get("revision", "")),
        "git.dirty": str(code.get("dirty", "")),
        **({"rlhf.worlds": worlds} if (worlds := worlds_in_words(read_worlds(run.store))) else {}),
        **({} if replay is None else {"rlhf.replay_of": str(replay["source_url"])}),
        **{f"package.{name}": version for name, version in body.get("packages", {}).items()},
    }
    tracker.start(run.run_id, body.get("config", {}), tags)


def _tell_iteration(run: AnyRun, tracker: Tracker, iteration: int) -> None:
    found = run.store.stage(iteration, Stage.UPDATE)
    assert found is not None, "iterations are completed in order"
    metrics, dataset = iteration_metrics(run.store, iteration), _dataset(run, iteration)
    tracker.log_iteration(iteration, metrics, [dataset], _ended_at(found[0].body))


def _ended_at(body: Mapping[str, Any]) -> float:
    """Unix seconds; of the log, so that telling the tracker twice tells it the same."""
    return float(body["started_at"]) + float(body["seconds"])


def _dataset(run: AnyRun, iteration: int) -> DatasetRecord:
    if isinstance(run, OpenSupervisedRun):
        return DatasetRecord(
            f"{run.run_id}/examples", ",".join(run.config.data.dataset), run.plan.fingerprint, run.method
        )
    found = run.store.stage(iteration, Stage.ROLLOUT)
    assert found is not None, "an iteration with an update has a rollout"
    ref = found[1]
    return DatasetRecord(f"{run.run_id}/rollout-{iteration:08d}", run.store.url_of(ref.path), ref.sha256, "rollout")


def _tell_version(run: AnyRun, tracker: Tracker, version: int) -> None:
    evaluation = run.store.read_evaluation(version)
    if evaluation is not None:
        tracker.log_evaluation(version, evaluation["metrics"], _ended_at(evaluation))
    checkpoint = CheckpointStore(run.store).get(version) if version else None
    if checkpoint is None:
        return
    origins = parents(run)
    trained_on = Stage.UPDATE if isinstance(run, OpenSupervisedRun) else Stage.ROLLOUT
    tracker.log_checkpoint(
        CheckpointRecord(
            name=_model_name(run, version),
            version=version,
            uri=CheckpointStore(run.store).url(version),
            digest=checkpoint["digest"],
            parent=origins["policy"],
            parents=origins,
            manifests=[run.store.manifest_url(iteration, trained_on) for iteration in range(version)],
            metrics=evaluation["metrics"] if evaluation is not None else {},
            ended_at=_ended_at(evaluation if evaluation is not None else checkpoint),
            exported=exported(run, version, checkpoint, evaluation),
        )
    )


def parents(run: AnyRun) -> dict[str, str]:
    """The models the run uses, by role: a name, or the URL of the checkpoint that a ``run:`` name was pinned to."""
    recorded: dict[str, dict[str, Any]] | None = (run.store.read_run() or {}).get("models")
    if recorded is None:  # a run that began before models were recorded
        assert isinstance(run.config, Config), "supervised runs have always recorded them"
        return models_of(run.config)
    return {role: str(model.get("url", model["spec"])) for role, model in recorded.items()}


def _tell_best(run: AnyRun, tracker: Tracker) -> None:
    best = best_pointer(run.store) if run.config.ckpt.best_metric_key is not None else None
    if best is not None:
        tracker.log_best(BestRecord(_model_name(run, best.version), best.version, best.key, best.value))


def _tell_deleted(run: AnyRun, telling: Telling) -> None:
    """What rotation has deleted, which follows a new checkpoint."""
    ckpt = run.config.ckpt
    if ckpt.max_num is not None or ckpt.max_mem is not None:
        kept = CheckpointStore(run.store).versions()
        if kept != telling.kept:
            telling.tracker.log_deleted(run.store.url, kept)
            telling.kept = kept


def _model_name(run: AnyRun, version: int) -> str:
    return f"{run.run_id}-v{version:08d}"
