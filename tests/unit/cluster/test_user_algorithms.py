"""Algorithms of a user's file in the scoring worker: refused at the start, used in every iteration."""

from __future__ import annotations

import logging

import pytest
from cluster_samples import row
from minimal_config import config
from test_experience import last, made

from rlhf_core.cluster.context import WorkerContext
from rlhf_core.cluster.scoring_worker import ScoringWorker
from rlhf_core.errors import ConfigError
from rlhf_core.telemetry import logs

OWN = """
from rlhf_core.algorithms.estimators import Estimator

twice = Estimator("twice", lambda rewards_G: 2 * (rewards_G - rewards_G.mean()), needs_group=True)
valued = Estimator("valued", lambda rewards_G: rewards_G, needs_critic=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger(logs.ROOT)  # a worker makes it its own
    keep = logger.handlers[:], logger.level, logger.propagate
    yield tmp_path
    logger.handlers[:], logger.level, logger.propagate = keep


def test_an_estimator_of_a_file_makes_the_advantages():
    rows = [row("g0", i, reward=reward) for i, reward in enumerate([1.0, 0.0])]

    experience, _ = made(rows, "algo.advantage.estimator=own.py:twice")

    assert last(experience) == [1, -1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algo.advantage.estimator=own.py:valued", r"needs the critic's values: set critic\.enable=true"),
        ("actor.policy_loss_type=own.py:gone", r"actor\.policy_loss_type='own\.py:gone': nothing in .*own\.py"),
    ],
)
async def test_the_worker_refuses_it_before_anything_is_scored(folder, monkeypatch, override, message):
    """The path is relative to the controller's folder, in which every worker lives."""
    monkeypatch.chdir("/")
    worker = ScoringWorker(WorkerContext("run", config(override), "cpu", str(folder), str(folder)))

    with pytest.raises(ConfigError, match=message):
        await worker.start([], None)
