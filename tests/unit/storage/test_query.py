import numpy as np
import pytest
from storage_samples import manifest, reward_row, trajectory

from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.records import ActionRange, RewardResult, RewardStatus, Stage, StopReason, VersionSpan
from rlhf_core.storage import RewardRow, trajectories
from rlhf_core.storage.query import COLUMNS


@pytest.fixture
def run(run_store):
    """Two iterations of two samples each; only the first is scored.

    iteration  sample  answer  reward       stop
    1          0       one     1.0          eos
    1          1       two     -0.5         length
    2          0       three   -            eos
    2          1       four    -            error
    """
    first = [trajectory(answer="one"), trajectory(sample=1, answer="two", stop_reason=StopReason.LENGTH)]
    failed = trajectory(sample=1, iteration=2, answer="four", stop_reason=StopReason.ERROR, error="boom")
    second = [trajectory(iteration=2, answer="three"), failed]
    rewards = [reward_row(sample=1, reward=-0.5, metrics={"exact": 0.0}), reward_row(sample=0)]
    run_store.commit(manifest([run_store.publish_trajectories(1, [row]) for row in first]))
    run_store.commit(manifest([run_store.publish_rewards(1, [row]) for row in rewards], Stage.REWARD))
    run_store.commit(manifest([run_store.publish_trajectories(2, second)], iteration=2))
    return run_store


def test_rewards_are_filled_in_where_there_are_any(run):
    table = trajectories(run, columns=["answer", "reward", "score", "reward_status"])

    assert sorted(table.to_pylist(), key=str) == sorted(
        [
            {"answer": "one", "reward": 1.0, "score": 1.0, "reward_status": "ok"},
            {"answer": "two", "reward": -0.5, "score": -0.5, "reward_status": "ok"},
            {"answer": "three", "reward": None, "score": None, "reward_status": "pending"},
            {"answer": "four", "reward": None, "score": None, "reward_status": "pending"},
        ],
        key=str,
    )


def test_only_the_groups_of_a_batch_are_shown(run_store):
    """Three groups share a shard; g1 was filtered, and g2 waited for the batch of iteration 2."""
    part = run_store.publish_trajectories(1, [trajectory(f"g{i}") for i in range(3)])
    for iteration, group in ((1, "g0"), (2, "g2")):
        run_store.commit(manifest([part], iteration=iteration, body={"selected": [{"group_id": group}]}))

    assert trajectories(run_store)["group_id"].to_pylist() == ["g0", "g2"]
    assert trajectories(run_store, iteration=2)["group_id"].to_pylist() == ["g2"]


def test_a_failed_scoring_shows_its_status_and_error(run_store):
    failed = RewardRow("g0", 0, RewardResult(RewardStatus.ERROR, error="ZeroDivisionError"))
    run_store.commit(manifest([run_store.publish_trajectories(1, [trajectory(reward=9.0)])]))
    run_store.commit(manifest([run_store.publish_rewards(1, [failed])], Stage.REWARD))

    (row,) = trajectories(run_store, columns=["reward", "reward_status", "reward_error"]).to_pylist()

    assert row == {"reward": None, "reward_status": "error", "reward_error": "ZeroDivisionError"}


def test_a_reward_of_the_executor_shows_before_the_reward_stage(run_store):
    row = trajectory(reward=0.25, reward_status=RewardStatus.OK)
    run_store.commit(manifest([run_store.publish_trajectories(1, [row])]))

    assert trajectories(run_store, columns=["reward"]).to_pylist() == [{"reward": 0.25}]


@pytest.mark.parametrize(
    ("where", "answers"),
    [
        ("reward < 0 and stop_reason = 'length'", {"two"}),
        ("reward is null", {"three", "four"}),
        ("iteration = 2 and error is null", {"three"}),
        ("mean_logprob <= -0.5 and tokens = 5", {"one", "two", "three", "four"}),
        ("reward > 100", set()),
    ],
)
def test_where_filters_on_columns_that_need_not_be_shown(run, where, answers):
    table = trajectories(run, where=where, columns=["answer"])

    assert table.column_names == ["answer"]
    assert set(table["answer"].to_pylist()) == answers


def test_one_iteration_only(run):
    assert set(trajectories(run, iteration=2)["answer"].to_pylist()) == {"three", "four"}


@pytest.mark.parametrize(("limit", "rows"), [(0, 0), (1, 1), (3, 3), (99, 4)])
def test_limit(run, limit, rows):
    assert len(trajectories(run, limit=limit)) == rows


def test_nothing_is_read_once_the_limit_is_reached(run):
    for part in run.published_parts(2, Stage.ROLLOUT):
        run.objects.delete(part.path)

    assert len(trajectories(run, limit=2)) == 2
    with pytest.raises(CorruptShardError, match="is missing"):
        trajectories(run)


def test_summaries_of_a_row(run_store):
    """5 prompt tokens and 2 turns with 3 tokens of feedback between; versions 4 and 6."""
    row = trajectory(
        tokens=tuple(range(12)),
        action_ranges=(ActionRange(5, 7), ActionRange(10, 12)),
        version_spans=(VersionSpan(5, 7, 4), VersionSpan(10, 12, 6)),
        rollout_logprobs=np.array([0] * 5 + [-1, -2] + [0] * 3 + [-3, -4], np.float32),
    )
    silent = trajectory(sample=1, action_ranges=(), version_spans=(), rollout_logprobs=np.zeros(5, np.float32))
    run_store.commit(manifest([run_store.publish_trajectories(1, [row, silent])]))

    shown = trajectories(run_store, columns=["tokens", "action_tokens", "mean_logprob", "version_min", "version_max"])

    assert [tuple(row.values()) for row in shown.to_pylist()] == [(12, 4, -2.5, 4, 6), (5, 0, None, None, None)]


def test_all_columns_of_many_rows(run_store):
    rows = [trajectory(f"g{i}", tokens=tuple(range(i % 9 + 3))) for i in range(600)]
    run_store.commit(manifest([run_store.publish_trajectories(1, rows)]))
    scored = [reward_row(f"g{i}", reward=float(i)) for i in reversed(range(600))]
    run_store.commit(manifest([run_store.publish_rewards(1, scored)], Stage.REWARD))

    table = trajectories(run_store)

    assert table.column_names == list(COLUMNS)
    assert table["reward"].to_pylist() == [float(i) for i in range(600)]
    assert table["tokens"].to_pylist() == [i % 9 + 3 for i in range(600)]


def test_a_part_that_no_manifest_names_is_not_shown(run):
    run.publish_trajectories(1, [trajectory(sample=7, answer="superseded")])

    assert "superseded" not in trajectories(run)["answer"].to_pylist()


def test_a_run_without_rollouts_is_an_empty_table(run_store):
    table = trajectories(run_store)

    assert len(table) == 0
    assert table.column_names == list(COLUMNS)


@pytest.mark.parametrize("options", [{"columns": ["answr"]}, {"where": "answr = 'x'"}])
def test_an_unknown_column_is_refused_and_the_known_ones_named(run, options):
    with pytest.raises(ConfigError, match=r"no column '?answr.*columns are .*answer.*"):
        trajectories(run, **options)


def test_comparing_different_types_is_refused(run):
    with pytest.raises(ConfigError, match=r"different types \(reward is double\)"):
        trajectories(run, where="reward = 'high'")
