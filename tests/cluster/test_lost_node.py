"""The placement group of a run outlives one of its nodes: what was there moves to the next node with room, the rest stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machines import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("lost_node.py")


@pytest.fixture(scope="module")
def seen():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "pipeline")])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, env=environment, text=True, timeout=240, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]  # Ray has something to say too
    return json.loads(line)


def test_one_slot_is_lost_with_all_that_shared_it(seen):
    assert seen["lost"] in (["engine-0", "policy-0"], ["engine-1", "policy-1"])


def test_without_another_node_it_says_what_is_missing_and_keeps_the_rest(seen):
    assert "needs 1 × (" in seen["message"]
    assert "1 GPU)" in seen["message"]


def test_the_same_group_goes_on_with_another_node(seen):
    (before,), (after,) = seen["before"], seen["after"]

    assert after == before
    assert [seen["again"][f"{role}-{index}"] for role in ("engine", "policy") for index in (0, 1)] == ["0"] * 4
