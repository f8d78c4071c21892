"""Flows in this process."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf_cli.stack import Stack, use_stack
from rlhf_core.errors import RunStoppedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rlhf_core.config.chain import FlowName


def run_here(flow: FlowName | Literal["chain"], *parameters: Any) -> dict[str, Any]:
    """Run a flow: on the local stack if it is up, else on a Prefect server that ends with this process.

    Args:
        flow: its name.
        parameters: of the flow, in their order.
    """

    def find() -> Any:
        from flows.chain import FLOWS, chain

        return chain if flow == "chain" else FLOWS[flow]

    return run_flow_here(find, *parameters)


def run_flow_here(find: Callable[[], Any], *parameters: Any, **named: Any) -> dict[str, Any]:
    """The same for any flow.

    Args:
        find: imports it; called once Prefect may read its settings.
        parameters: of the flow, in their order.
        named: of the flow, by name.
    """
    with prefect_here():
        function = find()
        from rlhf_core.cluster.connect import disconnect

        try:
            return asyncio.run(_logged(cast("Awaitable[dict[str, Any]]", function(*parameters, **named))))
        finally:
            disconnect()


async def _logged(flow: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The flow, and all that it logs: after the end of a temporary server Prefect would look for it for four minutes.

    Raises:
        RunStoppedError: it was asked to end before it was done.
    """
    from prefect.exceptions import CancelledRun
    from prefect.logging.handlers import APILogHandler

    try:
        return await flow
    except CancelledRun as error:
        raise RunStoppedError(str(error)) from error
    finally:
        await APILogHandler.aflush()


def prefect_here() -> AbstractContextManager[None]:
    """A Prefect server for flows in this process: the local stack's if it is up, else one that ends with the block.

    Enter it before prefect or ray are imported.
    """
    stack = Stack.here()
    served = use_stack(stack) or "PREFECT_API_URL" in os.environ
    return nullcontext() if served else stack.temporary_server()


def fresh_id(config: str) -> str:
    """A name for a run or a chain: that of its file, and the time."""
    return f"{Path(config).name.removesuffix('.yaml')}-{time.strftime('%Y%m%d-%H%M%S')}"
