"""Tokens of rollouts leave vLLM's engine core many at a time, not one by one.

::

    step ─▶ one row a request: token, log-prob ─▶ held back ──a request ends, or has TOKENS of them──▶ one row, sent
                                                     └──new weights are about to get their version──▶ all, under the old one

Nobody reads a request of a rollout before its end. vLLM sends each of its tokens nonetheless, with three arrays for the
log-prob, and its other process unpacks them and keeps accounts: as much work as sampling the token from a small model.

Runs in vLLM's engine core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKENS = 32  # of a request, at most, that wait: whoever counts what the engine does sees it go on


class Withheld:
    """What one engine core has not sent yet. Rows are vLLM's ``EngineCoreOutput``, requests those of its scheduler."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {}  # by request

    def hold(self, messages: dict[int, Any], requests: Mapping[str, Any]) -> None:
        """Take out of the messages of a step, by client, what can wait; put in what has waited long enough."""
        for client, message in list(messages.items()):
            message.outputs = [ready for row in message.outputs if (ready := self._passed(row, requests)) is not None]
            if not message.outputs and message.scheduler_stats is None and message.finished_requests is None:
                del messages[client]
        if len(self._rows) > len(requests):  # of aborted ones
            self._rows = {name: rows for name, rows in self._rows.items() if name in requests}

    def release(self, requests: Mapping[str, Any]) -> dict[int, list[Any]]:
        """All that waits, by client."""
        released: dict[int, list[Any]] = {}
        for name, rows in self._rows.items():
            if name in requests:
                released.setdefault(requests[name].client_index, []).append(_joined(rows))
        self._rows.clear()
        return released

    def _passed(self, row: Any, requests: Mapping[str, Any]) -> Any:
        """What is to be sent now that the row is there; None for nothing yet."""
        rows = self._rows.get(row.request_id)
        if rows is None:
            if not _may_wait(row, requests.get(row.request_id)):
                return row
            rows = self._rows[row.request_id] = []
        rows.append(row)
        if row.finish_reason is None and len(rows) < TOKENS:
            return None
        del self._rows[row.request_id]
        return _joined(rows)


def _may_wait(row: Any, request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    if request is None or row.finish_reason is not None or row.new_logprobs is None:
        return False
    params = request.sampling_params  # without text no stop string is looked for, and no client reads along
    asked_for_more = params.prompt_logprobs is not None or row.new_sampling_mask is not None
    return (
        params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not asked_for_more
        and row.routed_experts is None
    )


def _joined(rows: list[Any]) -> Any:
    """One row that says what ``rows`` of one request say."""
    last = rows[-1]
    if len(rows) == 1:
        return last
    last.new_token_ids = [token for row in rows for token in row.new_token_ids]
    arrays = zip(*(row.new_logprobs[:3] for row in rows if row.new_logprobs is not None), strict=True)
    kind = type(rows[0].new_logprobs)
    last.new_logprobs = kind(*(np.concatenate(parts) for parts in arrays), None)
    last.events = [event for row in rows for event in row.events or ()] or None
    last.prefill_stats = next((row.prefill_stats for row in rows if row.prefill_stats is not None), None)
    return last


def withhold() -> None:
    """Tell vLLM's engine core of this process. A second call changes nothing."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    def withheld(core: Any) -> Withheld:
        found: Withheld = vars(core).setdefault("_rlhf_withheld", Withheld())
        return found

    def attach(core: Any, messages: dict[int, Any]) -> None:
        EngineCore._attach_weight_version(core, messages)
        withheld(core).hold(messages, core.scheduler.requests)

    def set_version(core: Any, weight_version: str) -> None:
        for client, rows in withheld(core).release(core.scheduler.requests).items():
            message = EngineCoreOutputs(outputs=rows, weight_version=core._weight_version)
            core.output_queue.put_nowait((client, message))
        EngineCore.set_weight_version(core, weight_version)

    EngineCoreProc._attach_weight_version = attach
    EngineCoreProc.set_weight_version = set_version
