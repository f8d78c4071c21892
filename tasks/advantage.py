"""Rewards and log-probs to advantages."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefect import task

from rlhf_core.errors import RunFailedError
from rlhf_core.records import Ledger, Stage
from rlhf_core.telemetry import Stopwatch
from tasks.options import TASK_OPTIONS
from tasks.replay import warn_if_far
from tasks.run import OpenRun, current_run
from tasks.stages import commit, finished, required, small
from tasks.watch import at_stage

if TYPE_CHECKING:
    from rlhf_core.records import StageManifest


@task(name="advantage", task_run_name="advantage {iteration}", **TASK_OPTIONS)
@at_stage("advantage")
async def advantage(run_id: str, iteration: int) -> dict[str, Any]:
    """Everything the update trains on, as experience shards."""
    run = current_run(run_id)
    if done := await finished(run, iteration, Stage.EXPERIENCE):
        return small(done[1])
    watch = Stopwatch()
    played, rollout = await required(run, iteration, Stage.ROLLOUT)
    _, reward = await required(run, iteration, Stage.REWARD)
    kl_coef = await kl_coef_of(run, iteration)
    assembled = await run.session.heal(iteration, lambda: run.session.assemble(iteration, rollout, reward, kl_coef))
    warn_if_far(run, iteration, assembled.metrics)
    account = ledger(played, assembled.trained, assembled.failed)
    total = (await ledger_before(run, iteration)).then(account)
    check_ledgers(iteration, account, total)
    body = {
        **watch.stamp(),
        "metrics": assembled.metrics,
        "ledger": asdict(account),
        "ledger_total": asdict(total),
        "kl_coef": kl_coef,
    }
    return small(await commit(run, iteration, Stage.EXPERIENCE, assembled.parts, [rollout, reward], body))


def ledger(rollout: StageManifest, trained: int, failed: int) -> Ledger:
    """Where the prompts of an iteration went.

    Args:
        rollout: its manifest; with ``filtered``, ``failed``, ``carried``, ``buffered`` and ``unfinished`` where the batch was
            filled in rounds.
        trained: groups of the batch with a trained sample.
        failed: groups of the batch without one.
    """
    body = rollout.body
    return Ledger(
        drawn=body["drawn"],
        carried=body.get("carried", 0),
        trained=trained,
        filtered=body.get("filtered", 0),
        failed=failed + body.get("failed", 0),
        buffered=len(body.get("buffered", ())) + len(body.get("unfinished", ())),
    )


async def ledger_before(run: OpenRun, iteration: int) -> Ledger:
    """Where all prompts of the run went, before an iteration."""
    if iteration == 0:
        return Ledger()
    manifest, _ = await required(run, iteration - 1, Stage.EXPERIENCE)
    return Ledger(**manifest.body["ledger_total"])


def check_ledgers(iteration: int, account: Ledger, total: Ledger) -> None:
    """Refuse an iteration that lost a prompt or counted one twice.

    Raises:
        RunFailedError: it did; the message has the numbers.
    """
    for what, checked in ((f"iteration {iteration}", account), (f"the run up to iteration {iteration}", total)):
        if not checked.balanced:
            raise RunFailedError(f"{what}: prompts are lost or counted twice: {checked}")


async def kl_coef_of(run: OpenRun, iteration: int) -> float:
    """The KL coefficient of an iteration: what the controller made of the one before."""
    if iteration == 0:
        return run.config.algo.kl.init_coef
    manifest, _ = await required(run, iteration - 1, Stage.UPDATE)
    return float(manifest.body["kl_coef_next"])
