"""The best version: of evaluations in turn, of a log that was cut off, of a pointer that was lost."""

import logging

import pytest

from rlhf_core.storage import Best, CheckpointStore, best_after, best_pointer, stored_best

KEY = "eval/score_mean"


@pytest.fixture
def evaluated(run_store):
    """Record the score of a version; returns the best one then."""

    def record(version, score, mode="max", key=KEY):
        run_store.write_evaluation(version, {"version": version, "metrics": {KEY: score}})
        return best_after(run_store, version, key, mode)

    return record


def save(run_store, version, best, pointer=True):
    """A checkpoint without files, and the pointer."""
    body = {"best": None if best is None else {"version": best.version, "value": best.value, "key": best.key}}
    CheckpointStore(run_store).commit(version, body, [])
    if pointer and best is not None:
        run_store.set_pointer("best", body["best"])


def test_without_an_evaluation_there_is_no_best(run_store):
    assert stored_best(run_store) is None
    assert best_after(run_store, 1, KEY, "max") is None


@pytest.mark.parametrize(
    ("mode", "scores", "best"),
    [
        ("max", [0.5, 0.8, 0.6], (2, 0.8)),
        ("max", [0.5, 0.8, 0.8], (2, 0.8)),  # a tie: the earlier one
        ("min", [0.5, 0.8, 0.6], (1, 0.5)),
        ("min", [0.5, 0.5, 0.4], (3, 0.4)),
        ("max", [-3.0, -2.0, -1.0], (3, -1.0)),
        ("max", [0.0], (1, 0.0)),
    ],
)
def test_the_best_of_versions_evaluated_in_turn(run_store, evaluated, mode, scores, best):
    for version, score in enumerate(scores, 1):
        found = evaluated(version, score, mode)
        if found.version == version:
            save(run_store, version, found)

    assert (found.version, found.value) == best
    assert best_pointer(run_store) == stored_best(run_store) == Best(*best, KEY)


def test_the_model_before_training_is_no_checkpoint_and_does_not_compete(evaluated):
    assert evaluated(0, 0.9) is None
    assert evaluated(1, 0.1) == Best(1, 0.1, KEY)


def test_an_evaluation_without_the_metric_changes_nothing_and_says_so(run_store, evaluated, caplog):
    save(run_store, 1, evaluated(1, 0.5))

    with caplog.at_level(logging.WARNING):
        assert evaluated(2, 0.9, key="eval/pass@1") == Best(1, 0.5, KEY)
    assert "the evaluation of version 2 has no eval/pass@1" in caplog.text


def test_a_crash_before_the_pointer_forgets_nothing(run_store, evaluated):
    save(run_store, 1, evaluated(1, 0.5))
    save(run_store, 2, evaluated(2, 0.8), pointer=False)

    assert best_pointer(run_store) == Best(1, 0.5, KEY)
    assert stored_best(run_store) == Best(2, 0.8, KEY)
    assert evaluated(3, 0.6) == Best(2, 0.8, KEY)


def test_a_lost_pointer_is_read_from_the_newest_checkpoint(run_store, evaluated):
    save(run_store, 1, evaluated(1, 0.5))
    save(run_store, 2, stored_best(run_store))
    run_store.objects.delete("best.json")

    assert stored_best(run_store) == Best(1, 0.5, KEY)


def test_a_newer_pointer_counts_where_the_newest_checkpoint_is_older(run_store, evaluated):
    """The newest checkpoint is damaged: its file is gone."""
    save(run_store, 1, evaluated(1, 0.5))
    save(run_store, 2, evaluated(2, 0.8))
    run_store.objects.delete("checkpoints/v00000002/checkpoint.json")

    assert stored_best(run_store) == Best(2, 0.8, KEY)


def test_a_checkpoint_of_before_there_was_a_best_one(run_store):
    CheckpointStore(run_store).commit(1, {"cursor": 1}, [])

    assert stored_best(run_store) is None
