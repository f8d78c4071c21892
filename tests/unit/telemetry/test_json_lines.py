"""Log lines as JSON, and where they say that a run is."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest

from rlhf_core.records import StageRef
from rlhf_core.telemetry import at, configure_logging, get_logger, here, in_stage, log_format
from rlhf_core.telemetry.logs import ROOT

logger = get_logger("rlhf_core.somewhere")


@pytest.fixture
def said(capsys):
    """Gives the lines of a worker's logger while it does something."""
    root = logging.getLogger(ROOT)
    kept = (root.handlers[:], root.level, root.propagate)

    def lines(work):
        configure_logging("first", "policy-0", form="json")
        work()
        return [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    yield lines
    root.handlers[:], root.level, root.propagate = kept


def fail():
    try:
        raise ValueError("boom with hush-hush-hush")
    except ValueError:
        logger.exception("failed with hush-hush-hush")


def test_a_line_says_where_the_run_is(said):
    def work():
        with at(stage="update", iteration=3, policy_version=4):
            logger.warning("step %d\nskipped", 7)

    [line] = said(work)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "run_id": "first",
        "worker": "policy-0",
        "stage": "update",
        "iteration": 3,
        "policy_version": 4,
        "logger": "rlhf.somewhere",
        "message": "step 7\nskipped",
    }


def test_an_exception_is_in_its_line(said):
    [line] = said(fail)

    assert line["exception"].endswith("ValueError: boom with hush-hush-hush")


def test_a_secret_of_the_environment_is_masked_in_message_and_traceback(said, monkeypatch):
    """CASE 119"""
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")

    assert "hush" not in json.dumps(said(fail))


class Worker:
    @in_stage("advantage")
    def logprobs(self, rollout, reward):
        return here()

    @in_stage("evaluate")
    async def evaluate(self, version):
        await asyncio.sleep(0)
        return await asyncio.to_thread(here)


def test_iteration_and_version_are_found_among_the_arguments():
    ref = StageRef(run_id="first", iteration=5, stage="rollout", path="p", sha256="s", rows=1, tokens=1)
    place = Worker().logprobs(ref, reward=ref)

    assert (place.stage, place.iteration, here().stage) == ("advantage", 5, None)


async def test_calls_that_overlap_each_have_their_place():
    first, second = await asyncio.gather(Worker().evaluate(1), Worker().evaluate(2))

    assert [(place.stage, place.policy_version) for place in (first, second)] == [("evaluate", 1), ("evaluate", 2)]


@pytest.mark.parametrize(
    ("chosen", "variable", "form"),
    [(None, None, "text"), (None, "json", "json"), ("text", "json", "text"), ("json", None, "json")],
)
def test_the_configuration_decides_else_the_environment(monkeypatch, chosen, variable, form):
    monkeypatch.delenv("RLHF_LOG_FORMAT", raising=False)
    if variable:
        monkeypatch.setenv("RLHF_LOG_FORMAT", variable)

    assert log_format(chosen) == form


FLOW = """
import logging
from prefect.logging.configuration import setup_logging
from rlhf_core.telemetry import at, say_in_json
setup_logging()
say_in_json()
say_in_json()
with at(run_id="first", stage="rollout", iteration=2):
    logging.getLogger("prefect").warning("from Prefect")
"""


def test_the_flows_process_says_prefects_lines_too():
    said = subprocess.run([sys.executable, "-c", FLOW], capture_output=True, text=True, check=True, timeout=120).stderr

    [line] = [json.loads(line) for line in said.splitlines() if "from Prefect" in line]
    assert (line["run_id"], line["worker"], line["stage"], line["iteration"]) == ("first", "controller", "rollout", 2)
