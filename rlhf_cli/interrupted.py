"""Flow runs whose process ends with the stack: nobody else would ever say that they do not run any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed

if TYPE_CHECKING:
    from collections.abc import Callable

FLOWS = ["rlhf", "rlhf-iteration"]
UNDER_WAY = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.PAUSED]


async def mark_interrupted(say: Callable[[str], None]) -> None:
    """Mark what is under way as crashed; a retry goes on where it stopped."""
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
    async with get_client() as client:
        runs = await client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=FLOWS)), flow_run_filter=FlowRunFilter(state=state)
        )
        for run in runs:
            message = "The local stack was stopped. Retry, or the same run_id again, goes on where it stopped."
            # A name of its own: the automation that continues crashed runs leaves what was stopped on purpose alone.
            await client.set_flow_run_state(run.id, Crashed(name="Interrupted", message=message), force=True)
            say(f"interrupted {run.name}")
