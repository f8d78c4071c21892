"""Where a run is, by its log."""

import pytest

from rlhf_cli.launch import Position
from rlhf_core.records import Stage, StageManifest
from rlhf_core.storage import RunStore


@pytest.fixture
def store(tmp_path):
    store = RunStore("run", str(tmp_path))
    store.write_run({"plan": {"iterations": 3}})
    return store


def complete(store, iteration, **metrics):
    for stage in Stage:
        body = {"seconds": 1.0, "ledger": {}, "kl_coef": 0.0, "metrics": metrics if stage is Stage.REWARD else {}}
        store.commit(StageManifest("run", iteration, stage, (), 0, 0, iteration, body=body))


def test_a_run_without_a_log_is_nowhere(tmp_path):
    assert Position(RunStore("run", str(tmp_path))).look() is None


def test_how_far_a_run_is(store):
    complete(store, 0, **{"reward/mean": 0.25, "rollout/tokens_per_second": 100.0})

    assert Position(store).look() == {
        "completed": 1,
        "total": 3,
        "description": "rollout  ",
        "numbers": "reward 0.250  100 tok/s",
    }


def test_an_iteration_that_samples_or_trains_nothing_has_less_to_show(store):
    position = Position(store)
    complete(store, 0, **{"reward/mean": 0.25})
    first = position.look()["numbers"]
    complete(store, 1)

    assert (first, position.look()["numbers"]) == ("reward 0.250", "reward 0.250")


def test_how_far_a_supervised_run_is(tmp_path):
    store = RunStore("sft", str(tmp_path))
    store.write_run({"kind": "sft", "plan": {"iterations": 2}})
    body = {"seconds": 1.0, "metrics": {"train/loss": 2.5, "train/accuracy": 0.75}}
    store.commit(StageManifest("sft", 0, Stage.UPDATE, (), 0, 0, 0, body=body))

    assert Position(store).look() == {
        "completed": 1,
        "total": 2,
        "description": "training ",
        "numbers": "loss 2.500  accuracy 0.750",
    }
