"""Slots on a real Ray, which hands out two GPUs that nobody has: who shares one, who finds it again, who gives it back.

::

    controller "dies"      makes the run's slots and processes, and is killed
    controller "succeeds"  finds both; resumes with an engine of two GPUs instead of two engines; another run has no room, until
                           the first one ends
    controller "vanishes"  never comes back: the keeper gives all back
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CONTROLLER = Path(__file__).with_name("slot_controller.py")
ROOT = CONTROLLER.parents[2]


def controller(address, story):
    command = [sys.executable, str(CONTROLLER), story]
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def answers(address):
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def told(process):
    while line := process.stdout.readline():
        if line.startswith("{"):  # else one of Ray's own
            return json.loads(line)
    raise AssertionError("the controller failed; its errors are above")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a cluster of this module's own: the tests' own process may be on another one."""
    from rlhf_cli.stack import free_port
    from rlhf_core.cluster.connect import OBJECT_STORE_BYTES

    address = f"127.0.0.1:{free_port()}"
    log_path = tmp_path_factory.mktemp("ray") / "head.log"
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--num-cpus=4",
        "--num-gpus=2",
    ]
    command += ["--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    with log_path.open("wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 60
    while not answers(address):
        assert time.monotonic() < deadline, log_path.read_text()
        time.sleep(0.2)
    yield address
    family = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)


@pytest.fixture(scope="module")
def died(address):
    process = controller(address, "dies")
    seen = told(process)
    process.kill()
    process.wait()
    return seen


@pytest.fixture(scope="module")
def succeeded(address, died):
    process = controller(address, "succeeds")
    seen = told(process)
    assert process.wait(60) == 0
    return seen


def gpus(places):
    return {name: place["gpus"] for name, place in places.items()}


EACH_ITS_PAIR = {f"{role}-{index}": str(index) for role in ("engine", "policy", "reference") for index in (0, 1)}
OUTSIDE = {"rollout": None, "scoring": None}


def test_processes_of_a_slot_see_the_same_gpu(died):
    assert gpus(died["places"]) == EACH_ITS_PAIR | OUTSIDE


def test_they_sit_in_the_bundles_of_the_runs_placement_group(died):
    ((group, strategy, state, bundles),) = died["table"]

    assert (strategy, state) == ("PACK", "CREATED")
    assert {bundle["GPU"] for bundle in bundles.values()} == {1.0}
    assert {place["group"] for name, place in died["places"].items() if name not in OUTSIDE} == {group}
    assert {died["places"][name]["group"] for name in OUTSIDE} == {None}


def test_the_next_controller_finds_group_and_processes(died, succeeded):
    assert (succeeded["table"], succeeded["places"]) == (died["table"], died["places"])


def test_slots_of_another_shape_are_made_anew(died, succeeded):
    ((group, strategy, state, _),) = succeeded["wide"]["table"]

    assert group != died["table"][0][0]
    assert (strategy, state) == ("STRICT_PACK", "CREATED")


def test_workers_of_an_engine_across_slots_share_the_gpus_of_its_ranks(succeeded):
    """The engine itself holds none; its workers are started as vLLM's Ray executor starts them."""
    wide = succeeded["wide"]

    assert gpus(wide["places"])["engine-0"] is None
    assert wide["workers"] == ["0", "1"] == [wide["places"][f"policy-{index}"]["gpus"] for index in (0, 1)]


def test_a_run_without_room_says_what_it_lacks_and_who_holds_it(succeeded):
    refused = succeeded["refused"]

    assert "no room for the processes of the run within 1 s (run.start_timeout)" in refused["message"]
    assert "needs 2 × (1.899 CPU, 1 GPU)" in refused["message"]
    assert "; free: " in refused["message"]
    assert "0 of 2 GPU; held by: run run (3.798 CPU, 2 GPU)" in refused["message"]
    assert refused["left"] == []


def test_the_end_of_a_run_leaves_the_gpus_to_the_next(succeeded):
    assert succeeded["after"] == []
    assert gpus(succeeded["next"]["places"]) == EACH_ITS_PAIR | OUTSIDE


def test_a_run_whose_controller_never_comes_back_loses_its_slots(address, succeeded):
    process = controller(address, "vanishes")

    assert told(process) == {"table": [], "free": 2.0}
    assert process.wait(60) == 0
