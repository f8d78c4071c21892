"""Log lines of worker processes, and timings."""

import logging
import time

import pytest

from rlhf_core.telemetry import Stopwatch, configure_logging, get_logger, throughput
from rlhf_core.telemetry.logs import ROOT


@pytest.fixture
def root_logger():
    """The project's root logger, put back afterwards."""
    logger = logging.getLogger(ROOT)
    kept, factory = (logger.handlers[:], logger.level, logger.propagate), logging.getLogRecordFactory()
    yield logger
    logger.handlers[:], logger.level, logger.propagate = kept
    logging.setLogRecordFactory(factory)


def test_a_line_names_run_worker_and_module(root_logger, capsys):
    configure_logging("run-7", "engine-0")

    get_logger("rlhf_core.cluster.session").warning("engine %d is dead", 3)

    line = capsys.readouterr().err
    assert line.endswith("WARNING run=run-7 worker=engine-0 rlhf.cluster.session: engine 3 is dead\n")


def test_configuring_twice_does_not_say_things_twice(root_logger, capsys):
    configure_logging("run", "a")
    configure_logging("run", "b")

    get_logger("x").info("once")

    assert capsys.readouterr().err.count("once") == 1


def test_no_line_holds_a_secret(root_logger, capsys, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "hush-hush-0123")
    configure_logging("run", "a")

    try:
        raise ValueError("hush-hush-0123 is wrong")
    except ValueError:
        get_logger("x").exception("the judge refused %s", ("hush-hush-0123",))

    told = capsys.readouterr().err
    assert "hush" not in told
    assert "the judge refused ('***',)\nTraceback" in told
    assert "ValueError: *** is wrong" in told


def test_the_level(root_logger, capsys):
    configure_logging("run", "a", logging.WARNING)

    get_logger("x").info("too quiet")

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("module", "name"), [("rlhf_core.cluster.session", "rlhf.cluster.session"), ("tasks.lineage", "rlhf.tasks.lineage")]
)
def test_loggers_stand_below_the_projects_root(module, name):
    assert get_logger(module).name == name


def test_a_stopwatch():
    before = time.time()
    watch = Stopwatch()
    time.sleep(0.02)

    stamp = watch.stamp()

    assert before - 0.001 <= stamp["started_at"] <= time.time()
    assert 0.02 <= stamp["seconds"] <= watch.seconds + 0.0001


def test_a_stopwatch_survives_a_change_of_the_clock(monkeypatch):
    watch = Stopwatch()
    monkeypatch.setattr(time, "time", lambda: 0.0)

    assert 0 <= watch.seconds < 60


@pytest.mark.parametrize(("count", "seconds", "rate"), [(10, 2.0, 5.0), (10, 0.0, 0.0), (0, 2.0, 0.0)])
def test_throughput(count, seconds, rate):
    assert throughput(count, seconds) == rate
