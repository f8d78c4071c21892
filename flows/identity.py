"""One flow run per iteration, for ever: the same run on every retry of it, and on every retry of its parent.

Prefect matches a retried parent's children by call order. A parent that skips finished iterations would hand iteration 1
the flow run, and the result, of iteration 0. So each iteration is looked up by a key of its own:

* where a deployment of the iteration flow exists, its run is made from that deployment under the idempotency key
  ``{run_id}/{iteration}`` and executed in this process. The UI can then retry the iteration alone as well as its parent;
* without one (``rlhf train`` with no server) the child gets its own task key, so that call order does not matter.

Nobody believes a child's return value: the manifests of the run say what is done.

``run_flow`` with an existing run and the tracking task of a sub-flow are internal to Prefect: the version is pinned, and
tests/flows/test_identity.py covers both constructions.
"""

from __future__ import annotations

import asyncio
import types
from typing import TYPE_CHECKING, Any, cast

from prefect import Flow, Task, flow, get_client, runtime
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.states import Cancelled, Pending

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from uuid import UUID

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

# Work queue of the runs that their parents execute: only those of people are continued by automations.
CHILDREN = "children"


def named_as_its_run() -> str:
    """Name of a flow run: that of the run, where the caller gave one; else it keeps its own."""
    parameters = runtime.flow_run.parameters
    return str(parameters.get("run_id") or parameters.get("chain_id") or runtime.flow_run.name)


async def run_child(child: Flow[..., Any], deployment: str, key: str, name: str, parameters: dict[str, Any]) -> None:
    """Run ``child`` as the one flow run that belongs to ``key``, below the current flow run.

    Args:
        child: the flow.
        deployment: name of its deployment (without the flow's name); used if the server knows it.
        key: identity of this child, unique over all runs.
        name: shown in the UI.
        parameters: of the flow.

    Raises:
        Exception: whatever the child raised.
    """
    async with get_client() as client:
        known = await _deployment(client, f"{child.name}/{deployment}")
        if known is None:
            await cast("Awaitable[None]", _keyed(child, key, name)(**parameters))
            return
        flow_run = await _deployed_run(client, child, known, key, name, parameters)
    try:
        await cast("Awaitable[None]", run_flow(child, flow_run=flow_run, parameters=parameters))
    except asyncio.CancelledError:  # Prefect takes it for a crash
        async with get_client() as client:
            ended: State[Any] = Cancelled(
                message="the run ended, because it was cancelled or another part of it failed"
            )
            await client.set_flow_run_state(flow_run.id, ended, force=True)
        raise


async def _deployment(client: PrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


async def _deployed_run(
    client: PrefectClient,
    child: Flow[..., Any],
    deployment: DeploymentResponse,
    key: str,
    name: str,
    parameters: dict[str, Any],
) -> FlowRun:
    """The flow run of ``key``: made now, or found in whatever state an earlier attempt left it."""
    flow_run = await client.create_flow_run_from_deployment(
        deployment.id,
        parameters=parameters,
        state=Pending(),
        name=name,
        idempotency_key=key,
        work_queue_name=CHILDREN if deployment.work_pool_name else None,  # `flow.serve()` has no pool, and no queues
        parent_task_run_id=await _tracking_task(client, child, key, name),
    )
    if flow_run.state is not None and flow_run.state.type is not StateType.PENDING:
        again: State[Any] = Pending(name="Retrying")
        await client.set_flow_run_state(flow_run.id, again, force=True)
        flow_run.state = again
    return flow_run


async def _tracking_task(client: PrefectClient, child: Flow[..., Any], key: str, name: str) -> UUID | None:
    """The task run that stands for the child in its parent; None outside a flow."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    task: Task[..., Any] = Task(name=child.name, fn=child.fn)
    task.task_key = f"{child.name}-{key}"
    task_run = await client.create_task_run(
        task=task, flow_run_id=context.flow_run.id, dynamic_key=key, name=name, state=Pending()
    )
    return task_run.id


def _keyed(child: Flow[..., Any], key: str, name: str) -> Flow[..., Any]:
    """A copy of the flow whose task key is its own."""
    function = types.FunctionType(
        child.fn.__code__, child.fn.__globals__, child.fn.__name__, child.fn.__defaults__, child.fn.__closure__
    )
    function.__kwdefaults__ = child.fn.__kwdefaults__
    function.__annotations__ = child.fn.__annotations__
    function.__module__ = child.fn.__module__
    function.__qualname__ = f"{child.fn.__qualname__}_{key}"
    return flow(name=child.name, flow_run_name=name, validate_parameters=False)(function)
