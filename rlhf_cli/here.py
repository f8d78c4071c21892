"""Flows in this process."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rlhf_cli.stack import Stack, use_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

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
    stack = Stack.here()
    served = use_stack(stack) or "PREFECT_API_URL" in os.environ
    with nullcontext() if served else stack.temporary_server():
        function = find()
        from rlhf_core.cluster.connect import disconnect

        try:
            return asyncio.run(cast("Coroutine[Any, Any, dict[str, Any]]", function(*parameters, **named)))
        finally:
            disconnect()


def fresh_id(config: str) -> str:
    """A name for a run or a chain: that of its file, and the time."""
    return f"{Path(config).name.removesuffix('.yaml')}-{time.strftime('%Y%m%d-%H%M%S')}"
