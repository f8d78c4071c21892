"""``rlhf retrain``: one turn by hand, the schedule on or off, a turn given up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_cli.arguments import Overrides, out
from rlhf_cli.stack import Stack, use_stack
from rlhf_core.errors import ConfigError, LeaseError, RlhfError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEPLOYMENT = "rlhf/retrain"


def retrain(
    config: Annotated[str | None, typer.Option("--config", "-c", help="A retraining, or its name in configs/.")] = None,
    overrides: Overrides = None,
    switch: Annotated[bool | None, typer.Option("--on/--off", help="Turn the deployment's schedule on or off.")] = None,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Give the open turn up: its prompts are new again.")
    ] = False,
) -> None:
    """Train the champion on new prompts and promote what comes of it, if it is better: one turn, in this process."""
    if switch is not None:
        if config is not None or overrides or abandon:
            raise ConfigError("--on and --off are of the deployment's schedule: give them alone")
        _switch(switch)
        return
    if config is None:
        raise ConfigError("name a retraining with -c FILE, or turn the schedule on or off with --on, --off")
    from rlhf_core.config import load_retrain_config, plan_turn

    plan_turn(load_retrain_config(config, overrides or []))  # a mistake shows before anything starts
    if abandon:
        _abandon(config, overrides or [])
        return
    _one_turn(config, overrides or [])


def _one_turn(config: str, overrides: Sequence[str]) -> None:
    from rlhf_cli.here import run_flow_here

    def find() -> object:
        from flows.retrain import retrain as retrain_flow

        return retrain_flow

    try:
        decision = run_flow_here(find, config, list(overrides))
    except Exception as error:
        from prefect.exceptions import CancelledRun  # Prefect reads its settings as it is imported

        if isinstance(error, CancelledRun):
            raise RlhfError(str(error)) from error
        raise
    turn = f"turn {decision['turn']}: " if "turn" in decision else ""
    out.print(f"{turn}{decision['verdict']}: {decision['reason']}", markup=False, soft_wrap=True)


def _switch(on: bool) -> None:
    use_stack(Stack.here())
    from rlhf_cli.schedules import switch as switch_schedules  # Prefect reads its settings as it is imported

    for schedule in asyncio.run(switch_schedules(DEPLOYMENT, on)):
        out.print(f"{DEPLOYMENT} is {'on' if on else 'off'}: {schedule}", markup=False)


def _abandon(config: str, overrides: Sequence[str]) -> None:
    use_stack(Stack.here())
    from tasks.retraining import abandon_turn, claim, resolve_retraining

    async def give_up() -> int | None:
        retraining = await claim(resolve_retraining(config, overrides))
        try:
            return await asyncio.to_thread(abandon_turn, retraining)
        finally:
            await asyncio.to_thread(retraining.lease.release)

    try:
        number = asyncio.run(give_up())
    except LeaseError as error:
        raise RlhfError(f"the turn is under way: {error}") from error
    if number is None:
        raise RlhfError("there is no open turn to give up: the next start begins a new one")
    out.print(f"turn {number} is given up: its prompts are new again, its run stays as it is")
