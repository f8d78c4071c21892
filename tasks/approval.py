"""A human's word: the flow run pauses, its page in the UI shows what is asked, with a form.

The process stays and waits. It holds no GPUs (the training run has ended), and its lease on the retraining. A suspended flow
run would free the process too, but nothing could then tell it from a dead one.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from prefect import get_client, runtime
from prefect.flow_runs import apause_flow_run
from prefect.input import RunInput, keyset_from_paused_state
from prefect.states import Paused, Running

from rlhf_core.errors import RlhfError

POLL_SECONDS = 2
# The server refuses to go on with a pause that is over. It is longer than the wait, so that the flow run can end well.
GRACE_SECONDS = 3600


class Approval(RunInput):
    """The form."""

    approve: bool
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered, or that nobody did."""

    approved: bool
    comment: str
    reason: str  # why not; empty if approved

    def to_json(self) -> dict[str, Any]:
        """For the log."""
        return asdict(self)


async def ask(subject: str, question: str, seconds: float) -> Answer:
    """Pause the current flow run until somebody answers. An answer to an earlier attempt of this flow run counts.

    Args:
        subject: what it is about, in a few characters: an answer about another one does not count.
        question: Markdown, above the form.
        seconds: how long to wait.
    """
    attempt = int(runtime.flow_run.run_count)
    for earlier in range(1, attempt):
        given = await _stored(_key(subject, earlier))
        if given is not None:
            return _answer(given)
    key, form = _key(subject, attempt), Approval.with_initial_data(description=question)
    given = None
    try:
        given = await asyncio.wait_for(
            apause_flow_run(
                wait_for_input=form,
                timeout=int(seconds) + GRACE_SECONDS,
                poll_interval=POLL_SECONDS,
                key=key,
            ),
            seconds,
        )
    except TimeoutError:
        given = await _stop_waiting(key)
    if given is None:
        return Answer(False, "", f"nobody answered within {seconds:g} s")
    return _answer(given)


def _answer(given: Approval) -> Answer:
    why = f": {given.comment}" if given.comment else ""
    return Answer(given.approve, given.comment, "" if given.approve else f"a human declined{why}")


async def _stop_waiting(key: str) -> Approval | None:
    """Go on without an answer, or with one that came in the last moment."""
    state: Any = Running()
    async with get_client() as client:
        done = await client.set_flow_run_state(runtime.flow_run.id, state)
        flow_run = await client.read_flow_run(runtime.flow_run.id)
    if flow_run.state is None or not flow_run.state.is_running():
        raise RlhfError(f"the flow run does not go on after its pause: {done.details}")
    return await _stored(key)


async def _stored(key: str) -> Approval | None:
    """The answer to an attempt's question, if there is one."""
    keyset = keyset_from_paused_state(Paused(pause_key=key))
    async with get_client() as client:
        inputs = await client.filter_flow_run_input(
            flow_run_id=runtime.flow_run.id, key_prefix=keyset["response"], limit=1, exclude_keys=set()
        )
    return Approval(**inputs[0].decoded_value) if inputs else None


def _key(subject: str, attempt: int) -> str:
    return f"approval-{subject}-{attempt}"
