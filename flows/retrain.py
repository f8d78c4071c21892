"""A turn of a retraining.

::

    registry: champion ─┐                                                       ┌ better by the margin ─▶ (approval) ─▶ promote
    prompts not seen ───┴▶ begin ─▶ train from the champion ─▶ compare, paired ─┴ else refuse: the champion stays
                           │        └ a flow run of its own; its first evaluation is the champion's, its last the challenger's
                           └ nothing new: the end

The log of the retraining says where to go on: a turn that broke off is the next start's turn, and a retry's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from prefect import flow, runtime
from prefect.client.schemas.objects import State  # noqa: TC002  Prefect reads the annotations
from prefect.states import Cancelled, Completed

from flows.identity import run_child
from flows.stopping import heeding_signals, stopped, stops_with_its_child
from flows.train import train
from rlhf_core.errors import LeaseError, RunStoppedError
from rlhf_core.storage.lease_renewal import renewed
from tasks.approval import ask
from tasks.comparison import question
from tasks.retrain import begin_turn, carry_out_decision, compare, decide, record_prompts
from tasks.retraining import Retraining, claim, resolve_retraining

if TYPE_CHECKING:
    from rlhf_core.storage.retrain_log import TurnRecord


@flow(name="rlhf", persist_result=False)
async def retrain(
    config: str | dict[str, Any] = "retrain_tiny_cpu.yaml", overrides: list[str] | None = None
) -> State[Any]:
    """Train the champion on the prompts that are new since the last turn, and promote what comes of it if it is better.

    Args:
        config: A file, the name of one in configs/, or the retraining itself.
        overrides: Keys set on top, as margin=0.1 or section.key=value of what is trained.
    """
    checked = resolve_retraining(config, overrides or [])
    try:
        retraining = await claim(checked, str(runtime.flow_run.id))
    except LeaseError as error:
        return Cancelled(message=f"another turn is under way: {error}")
    async with renewed(retraining.lease):
        return await one_turn(retraining)


async def one_turn(retraining: Retraining) -> State[Any]:
    """Everything that the log says is not done yet."""
    begun = await begin_turn(retraining, str(runtime.flow_run.id))
    turn = begun.turn
    if turn is None:
        least = retraining.config.min_new_prompts
        message = f"nothing to train on: {begun.new} of {begun.total} prompts are new (min_new_prompts={least})"
        return Completed(message=message, data={"verdict": "nothing new", "reason": message})
    if await asyncio.to_thread(retraining.log.decision, turn.number) is None:
        try:
            await _train(retraining, turn)
        except RunStoppedError as error:
            return cast("State[Any]", stopped(error))
        await record_prompts(retraining, turn)
        comparison = await compare(retraining, turn)
        answer = None
        if comparison.better and retraining.config.approval.enable:
            asked = question(retraining, turn, comparison)
            answer = await ask(f"turn-{turn.number}", asked, retraining.config.approval.timeout)
        await decide(retraining, turn, comparison, answer)
    decision = await carry_out_decision(retraining, turn)
    return Completed(message=f"turn {turn.number} {decision['verdict']}: {decision['reason']}", data=decision)


async def _train(retraining: Retraining, turn: TurnRecord) -> None:
    """Run the turn's training to its end, if it is not there yet.

    Raises:
        RunStoppedError: the turn was asked to end before.
    """
    if await asyncio.to_thread(retraining.run_store(turn).read_end) is not None:
        return
    ended = f"turn {turn.number} was asked to end: the next start goes on with it"
    with heeding_signals() as stopping, stops_with_its_child(stopping, ended):
        await run_child(
            train,
            deployment="train",
            key=f"{retraining.log.store.url}/{turn.number}",
            name=turn.run_id,
            parameters={
                "config": retraining.run_config(turn).model_dump(mode="json"),
                "overrides": [],
                "run_id": turn.run_id,
            },
        )
