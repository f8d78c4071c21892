"""The log of a retraining, and which rows a run has sampled."""

import pytest
from storage_samples import manifest, trajectory

from rlhf_core.errors import ConflictError, CorruptShardError
from rlhf_core.records import PromptCursor, Round, Stage
from rlhf_core.storage import RunStore
from rlhf_core.storage.drawn import drawn_rows
from rlhf_core.storage.retrain_log import RetrainLog, TurnRecord


@pytest.fixture
def log(tmp_path):
    return RetrainLog(RunStore("digits", str(tmp_path)))


def turn(number, flow_run="f", **changes):
    fields = {
        "number": number,
        "run_id": f"digits-{number:04d}",
        "flow_run_id": f"{flow_run}{number}",
        "start": "builtin:tiny",
        "start_from": "config",
        "start_version": None,
        "rows": "turns/rows.json",
        "row_count": 2,
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return TurnRecord(**(fields | changes))


def test_a_turn_is_open_until_it_is_settled(log):
    assert (log.numbers(), log.open_turn()) == ([], None)
    log.begin(turn(1))
    assert log.open_turn() == turn(1)

    log.write_decision(1, {"verdict": "refused"})
    assert log.open_turn() == turn(1)  # decided, not carried out
    log.settle(1)

    assert (log.open_turn(), log.decision(1)["verdict"]) == (None, "refused")


def test_the_turn_of_a_flow_run(log):
    log.begin(turn(1))
    log.begin(turn(2))

    assert (log.begun_by("f1"), log.begun_by("f9")) == (turn(1), None)


def test_a_turn_begins_once(log):
    log.begin(turn(1))

    with pytest.raises(ConflictError):
        log.begin(turn(1, start="another"))


def test_what_was_sampled_is_seen_unless_its_turn_was_given_up(log):
    for number, rows, verdict in ((1, ["a", "ü"], "promoted"), (2, ["b"], "abandoned"), (3, ["c"], "refused")):
        log.begin(turn(number))
        log.write_drawn(number, rows)
        log.write_decision(number, {"verdict": verdict})
    log.begin(turn(4))

    assert log.seen() == {"a", "ü", "c"}


def test_a_list_that_was_not_used_is_no_turn(log):
    """Killed between the list of rows and the turn."""
    log.write_rows(1, ["b", "a"])
    path = log.write_rows(1, ["a", "b", "c"])

    assert log.numbers() == []
    assert log.store.objects.read(path) == b'["a", "b", "c"]'


# --- which rows a run has sampled


def test_rows_of_complete_rollouts_and_of_rounds_are_drawn(tmp_path):
    store = RunStore("run", str(tmp_path))
    part = store.publish_trajectories(0, [trajectory("g0", 0), trajectory("g0", 1), trajectory("g1")])
    store.commit(manifest([part], iteration=0))
    rejected = store.publish_trajectories(1, [trajectory("g2")])
    store.record_round(
        Round(1, 0, 0, PromptCursor(0, 3), 1, {"g2": "too_low"}, {"g2": rejected.path}, (rejected,), {"parts": []})
    )
    store.publish_trajectories(2, [trajectory("g3")])  # of a rollout that is not complete

    assert drawn_rows(store) == {"row-g0", "row-g1", "row-g2"}


def test_a_damaged_shard_is_named(tmp_path):
    store = RunStore("run", str(tmp_path))
    part = store.publish_trajectories(0, [trajectory()])
    store.commit(manifest([part], iteration=0, stage=Stage.ROLLOUT))
    path = store.objects.local_path(part.path)
    path.chmod(0o644)
    path.write_bytes(b"x" * part.bytes)

    with pytest.raises(CorruptShardError, match=part.sha256):
        drawn_rows(store)
