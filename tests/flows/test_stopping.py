"""A process that is asked to end by a signal, at any moment."""

import asyncio
import os
import signal

import pytest
from prefect.exceptions import CancelledRun

from flows.stopping import Stopping, heeding_signals, stops_with_its_child
from rlhf_core.errors import RunStoppedError


async def test_a_signal_before_the_run_is_open_counts_too():
    with heeding_signals() as stopping:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)
        stopped = []
        stopping.then(lambda: stopped.append("order"))

    assert stopping.asked
    assert stopped == ["order"]


async def test_a_signal_later_acts_at_once():
    stopped = []
    with heeding_signals() as stopping:
        stopping.then(lambda: stopped.append("order"))
        assert not stopping.asked

        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)

    assert stopped == ["order"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


async def test_a_stage_is_asked_with_its_chain_and_the_chain_heeds_after_it():
    stopped = []
    with heeding_signals() as chain:
        with heeding_signals() as stage:
            stage.then(lambda: stopped.append("stage"))
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)
        assert (chain.asked, stopped) == (True, []), "the stage is over"

        with heeding_signals() as later:
            later.then(lambda: stopped.append("later stage"))

    assert stopped == ["later stage"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_child_that_is_cancelled_as_asked_stops_its_parent():
    stopping = Stopping()

    with pytest.raises(RunStoppedError, match="asked to end"), stops_with_its_child(stopping, "asked to end"):
        stopping.ask()
        raise CancelledRun("stage one")


def test_a_child_that_somebody_cancelled_is_cancelled():
    with pytest.raises(CancelledRun, match="stage one"), stops_with_its_child(Stopping(), "asked to end"):
        raise CancelledRun("stage one")


def test_no_child_begins_after_the_question():
    stopping, began = Stopping(), []
    stopping.ask()

    with pytest.raises(RunStoppedError, match="asked to end"), stops_with_its_child(stopping, "asked to end"):
        began.append("stage two")

    assert began == []


def test_a_child_that_ended_well_although_asked_counts():
    stopping = Stopping()

    with stops_with_its_child(stopping, "asked to end"):
        stopping.ask()
