import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from storage_samples import assert_same, experience, manifest, reward_row, trajectory

from rlhf_core.errors import ConfigError, ConflictError, CorruptShardError
from rlhf_core.records import OpenGroup, PromptCursor, Round, Stage
from rlhf_core.storage import RunStore


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "a/b", "/etc", "a b", "é", "a\n", "a\\b", "x" * 129, "~"])
def test_a_run_id_that_could_leave_its_root_is_refused(run_id, tmp_path):
    with pytest.raises(ConfigError, match="cannot name a folder"):
        RunStore(run_id, str(tmp_path))


@pytest.mark.parametrize("run_id", ["a", "grpo-2026.11_29", "...", "x" * 128])
def test_a_sound_run_id_is_a_folder_of_the_root(run_id, tmp_path):
    assert RunStore(run_id, str(tmp_path)).url == f"file://{tmp_path}/{run_id}"


def test_a_run_store_pickles(run_store):
    run_store.write_run({"seed": 1})

    assert pickle.loads(pickle.dumps(run_store)).read_run() == {"seed": 1}


def test_run_json_is_immutable(run_store):
    assert run_store.read_run() is None

    run_store.write_run({"seed": 1})
    run_store.write_run({"seed": 1})

    with pytest.raises(ConflictError, match=r"run\.json exists already"):
        run_store.write_run({"seed": 2})
    assert run_store.read_run() == {"seed": 1}


def test_a_run_ends_once(run_store):
    assert run_store.read_end() is None

    run_store.write_end(3)
    run_store.write_end(3)

    with pytest.raises(ConflictError, match=r"finished\.json exists already"):
        run_store.write_end(4)
    assert run_store.read_end() == 3


def test_trajectories_come_back_in_order_of_their_parts(run_store):
    rows = [trajectory("é", i) for i in range(3)]
    parts = [run_store.publish_trajectories(1, rows[:2]), run_store.publish_trajectories(1, rows[2:])]

    for row, back in zip(rows, run_store.read_trajectories(parts), strict=True):
        assert_same(row, back)
    assert [(p.rows, p.tokens) for p in parts] == [(2, 10), (1, 5)]


def test_rewards_and_experience_come_back(run_store):
    rewards, rows = [reward_row(sample=i) for i in range(2)], [experience(length=6)]

    assert run_store.read_rewards([run_store.publish_rewards(1, rewards)]) == rewards
    assert_same(run_store.read_experience([run_store.publish_experience(1, rows)])[0], rows[0])


def test_objects_lie_where_the_design_says(local_run):
    parts = [local_run.publish_trajectories(12, [trajectory()])]
    local_run.commit(manifest(parts, iteration=12))
    local_run.commit(manifest([], Stage.UPDATE, iteration=12))
    local_run.write_evaluation(12, {})
    local_run.set_pointer("latest", {"version": 12})

    stored = local_run.objects.list()

    assert [path for path in stored if not path.endswith(".arrow")] == [
        "eval/v00000012.json",
        "iterations/00000012/rollout.json",
        "iterations/00000012/update.json",
        "latest.json",
    ]
    assert parts[0].path.startswith("iterations/00000012/rollout/000001r-5t-")
    assert local_run.url_of("latest.json") == f"{local_run.url}/latest.json"


def test_published_parts_are_found_without_a_manifest(run_store):
    parts = [run_store.publish_trajectories(1, [trajectory(sample=i)]) for i in range(3)]
    run_store.publish_trajectories(2, [trajectory(sample=9)])

    found = run_store.published_parts(1, Stage.ROLLOUT)

    assert sorted(found, key=str) == sorted(parts, key=str)
    assert run_store.published_parts(3, Stage.ROLLOUT) == []


def test_a_retry_that_makes_the_same_rows_makes_the_same_object(run_store):
    first = run_store.publish_trajectories(1, [trajectory()])
    second = run_store.publish_trajectories(1, [trajectory()])

    assert first == second
    assert run_store.published_parts(1, Stage.ROLLOUT) == [first]


def test_a_manifest_is_the_completion_of_its_stage(run_store):
    parts = [run_store.publish_trajectories(1, [trajectory()])]
    written = manifest(parts, inputs={"prompts": "ab"}, body={"cursor": {"epoch": 0, "offset": 8}})

    assert run_store.stage(1, Stage.ROLLOUT) is None
    ref = run_store.commit(written)

    assert run_store.stage(1, Stage.ROLLOUT) == (written, ref)
    assert run_store.read_manifest(ref) == written
    assert (ref.rows, ref.tokens, ref.path) == (1, 5, "iterations/00000001/rollout.json")


def test_the_first_manifest_wins_and_a_second_commit_gets_its_reference(run_store):
    first = run_store.commit(manifest([run_store.publish_trajectories(1, [trajectory()])], body={"attempt": 1}))

    second = run_store.commit(manifest([run_store.publish_trajectories(1, [trajectory("g1")])], body={"attempt": 2}))

    assert second == first
    assert run_store.read_manifest(second).body == {"attempt": 1}


def test_of_sixteen_racing_commits_one_wins_and_all_learn_which(run_store):
    def commit(attempt):
        return run_store.commit(manifest([], Stage.UPDATE, body={"attempt": attempt}))

    with ThreadPoolExecutor(16) as pool:
        refs = set(pool.map(commit, range(16)))

    assert refs == {run_store.stage(1, Stage.UPDATE)[1]}


def test_updates_say_how_far_the_run_is(run_store):
    assert run_store.newest_update() is None
    for iteration in (0, 1, 2):
        run_store.commit(manifest([], Stage.UPDATE, iteration=iteration, body={"version_after": iteration + 1}))
    run_store.publish_trajectories(3, [trajectory()])

    iteration, update = run_store.newest_update()

    assert (iteration, update.body) == (2, {"version_after": 3})
    assert run_store.completed_iterations() == [0, 1, 2]
    assert run_store.iterations() == [0, 1, 2, 3]


def test_case_10_rows_of_a_superseded_attempt_are_kept_and_not_read(run_store):
    """An older attempt left 2 parts; the new one's manifest names its own."""
    for sample in range(2):
        run_store.publish_trajectories(6, [trajectory(sample=sample, iteration=6, answer="old")])
    new = run_store.publish_trajectories(6, [trajectory(iteration=6, answer="new")])
    ref = run_store.commit(manifest([new], iteration=6))

    rows = run_store.read_trajectories(run_store.read_manifest(ref).parts)

    assert [row.answer for row in rows] == ["new"]
    assert len(run_store.published_parts(6, Stage.ROLLOUT)) == 3


def played(number=0, iteration=1, **changes):
    fields = {
        "iteration": iteration,
        "number": number,
        "epoch": 0,
        "cursor_out": PromptCursor(0, 8),
        "drawn": 2,
        "verdicts": {"g0": "kept", "g1": "too_low"},
        "places": {"g0": "p0", "g1": "p1"},
        "parts": (),
        "scored": {"parts": [], "scores": {"g0": [0.0, 1.0], "g1": [0.0, 0.0]}},
    }
    return Round(**(fields | changes))


def test_a_round_is_recorded_once(run_store):
    first = run_store.record_round(played(parts=(run_store.publish_trajectories(1, [trajectory()]),)))

    second = run_store.record_round(played(drawn=9))

    assert second == first
    assert run_store.rounds(1) == [first]
    assert run_store.rounds(2) == []


def test_a_round_comes_back_with_what_was_in_flight_or_sampled_again(run_store):
    changes = {"unfinished": (OpenGroup("g7", 2),), "again": ("g1",), "oldest_versions": {"g0": 3}}

    recorded = run_store.record_round(played(**changes))

    assert recorded == played(**changes)


def test_rounds_come_back_in_order(run_store):
    for number in range(12):
        run_store.record_round(played(number))

    assert [found.number for found in run_store.rounds(1)] == list(range(12))


def test_a_round_that_is_missing_or_of_elsewhere_is_an_error(run_store):
    run_store.record_round(played(1))
    with pytest.raises(CorruptShardError, match=r"rounds/00\.json is missing"):
        run_store.rounds(1)

    run_store.objects.put(
        "iterations/00000002/rounds/01.json", run_store.objects.read("iterations/00000001/rounds/01.json")
    )
    with pytest.raises(CorruptShardError, match="is round 1 of iteration 1: it does not belong there"):
        run_store.round(2, 1)


def test_the_parts_of_an_earlier_round_are_not_read_again(run_store):
    first, second = (run_store.publish_trajectories(1, [trajectory(group)]) for group in ("g0", "g1"))

    assert run_store.published_parts(1, Stage.ROLLOUT, without={first.path}) == [second]


def test_a_manifest_may_name_parts_of_an_earlier_iteration(run_store):
    """A group that waited was sampled then."""
    waited, new = (run_store.publish_trajectories(i, [trajectory(f"g{i}", iteration=i)]) for i in (1, 2))

    ref = run_store.commit(manifest([waited, new], iteration=2))

    assert [row.group_id for row in run_store.read_trajectories(run_store.read_manifest(ref).parts)] == ["g1", "g2"]


def test_an_evaluation_is_recorded_once(run_store):
    assert run_store.read_evaluation(4) is None

    assert run_store.write_evaluation(4, {"pass@1": 0.5}) == {"pass@1": 0.5}
    assert run_store.write_evaluation(4, {"pass@1": 0.6}) == {"pass@1": 0.5}
    assert run_store.read_evaluation(4) == {"pass@1": 0.5}


def test_evaluation_trajectories_come_back(run_store):
    part = run_store.publish_eval_trajectories(4, [trajectory(answer="42")])

    assert part.path.startswith("eval/v00000004/")
    assert run_store.read_trajectories([part])[0].answer == "42"


def test_pointers_move(run_store):
    assert run_store.pointer("best") is None

    run_store.set_pointer("best", {"version": 3})
    run_store.set_pointer("best", {"version": 5})

    assert run_store.pointer("best") == {"version": 5}
