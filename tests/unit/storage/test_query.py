import logging

import duckdb
import numpy as np
import pytest
from storage_samples import manifest, reward_row, trajectory

from rlhf_core.errors import ConfigError, CorruptShardError
from rlhf_core.records import ActionRange, RewardResult, RewardStatus, Stage, StopReason, VersionSpan
from rlhf_core.storage import RewardRow, RunStore, query_trajectories, trajectories
from rlhf_core.storage.find_run import find_runs
from rlhf_core.storage.query.readable import COLUMNS, READABLE


@pytest.fixture
def run(local_run):
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
    local_run.commit(manifest([local_run.publish_trajectories(1, [row]) for row in first]))
    local_run.commit(manifest([local_run.publish_rewards(1, [row]) for row in rewards], Stage.REWARD))
    local_run.commit(manifest([local_run.publish_trajectories(2, second)], iteration=2))
    return local_run


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


def test_only_the_groups_of_a_batch_are_shown(local_run):
    """Three groups share a shard; g1 was filtered, and g2 waited for the batch of iteration 2."""
    part = local_run.publish_trajectories(1, [trajectory(f"g{i}") for i in range(3)])
    for iteration, group in ((1, "g0"), (2, "g2")):
        local_run.commit(manifest([part], iteration=iteration, body={"selected": [{"group_id": group}]}))

    assert trajectories(local_run)["group_id"].to_pylist() == ["g0", "g2"]
    assert trajectories(local_run, iteration=2)["group_id"].to_pylist() == ["g2"]


def test_a_failed_scoring_shows_its_status_and_error(local_run):
    failed = RewardRow("g0", 0, RewardResult(RewardStatus.ERROR, error="ZeroDivisionError"))
    local_run.commit(manifest([local_run.publish_trajectories(1, [trajectory(reward=9.0)])]))
    local_run.commit(manifest([local_run.publish_rewards(1, [failed])], Stage.REWARD))

    (row,) = trajectories(local_run, columns=["reward", "reward_status", "reward_error"]).to_pylist()

    assert row == {"reward": None, "reward_status": "error", "reward_error": "ZeroDivisionError"}


def test_a_reward_of_the_executor_shows_before_the_reward_stage(local_run):
    row = trajectory(reward=0.25, reward_status=RewardStatus.OK)
    local_run.commit(manifest([local_run.publish_trajectories(1, [row])]))

    assert trajectories(local_run, columns=["reward"]).to_pylist() == [{"reward": 0.25}]


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


def test_summaries_of_a_row(local_run):
    """5 prompt tokens and 2 turns with 3 tokens of feedback between; versions 4 and 6."""
    row = trajectory(
        tokens=tuple(range(12)),
        action_ranges=(ActionRange(5, 7), ActionRange(10, 12)),
        version_spans=(VersionSpan(5, 7, 4), VersionSpan(10, 12, 6)),
        rollout_logprobs=np.array([0] * 5 + [-1, -2] + [0] * 3 + [-3, -4], np.float32),
    )
    silent = trajectory(sample=1, action_ranges=(), version_spans=(), rollout_logprobs=np.zeros(5, np.float32))
    local_run.commit(manifest([local_run.publish_trajectories(1, [row, silent])]))

    shown = trajectories(local_run, columns=["tokens", "action_tokens", "mean_logprob", "version_min", "version_max"])

    assert [tuple(row.values()) for row in shown.to_pylist()] == [(12, 4, -2.5, 4, 6), (5, 0, None, None, None)]


def test_all_columns_of_many_rows(local_run):
    rows = [trajectory(f"g{i}", tokens=tuple(range(i % 9 + 3))) for i in range(600)]
    local_run.commit(manifest([local_run.publish_trajectories(1, rows)]))
    scored = [reward_row(f"g{i}", reward=float(i)) for i in reversed(range(600))]
    local_run.commit(manifest([local_run.publish_rewards(1, scored)], Stage.REWARD))

    table = trajectories(local_run)

    assert table.column_names == list(READABLE)
    assert table["reward"].to_pylist() == [float(i) for i in range(600)]
    assert table["tokens"].to_pylist() == [i % 9 + 3 for i in range(600)]


def test_a_part_that_no_manifest_names_is_not_shown(run):
    run.publish_trajectories(1, [trajectory(sample=7, answer="superseded")])

    assert "superseded" not in trajectories(run)["answer"].to_pylist()


def test_a_run_without_rollouts_is_an_empty_table(local_run):
    table = trajectories(local_run)

    assert len(table) == 0
    assert table.column_names == list(READABLE)


@pytest.mark.parametrize("options", [{"columns": ["answr"]}, {"where": "answr = 'x'"}, {"order_by": "answr"}])
def test_an_unknown_column_is_refused_and_the_known_ones_named(run, options):
    with pytest.raises(ConfigError, match=r"answr.*columns are .*answer.*"):
        trajectories(run, **options)


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("", "without selection list"),
        ("reward = 'high'", "Could not convert string 'high' to DOUBLE"),
        ("answer < 3", "Cannot compare values of type VARCHAR"),
        ('answer = "one"', '"one" not found'),
        ("reward < 0; drop table trajectories", "more than one statement"),
        ("true) union select 'x' where (true", "syntax error"),
        ("reward < 0 limit 1", "holds a modifier"),
        ("answer in (select content from read_text('/etc/passwd'))", "file system operations are disabled"),
        ("answer in (from '/etc/passwd')", "does not exist"),
    ],
)
def test_a_condition_that_is_none_is_refused(run, where, problem):
    with pytest.raises(ConfigError, match=problem):
        trajectories(run, where=where)


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "select 1; select 2",
        "drop table trajectories",
        "copy (select 1) to 'stolen.csv'",
        "attach 'other.db'",
        "install httpfs",
        "set enable_external_access = true",
        "select * from read_csv('/etc/passwd')",
        "select * from run",
    ],
)
def test_nothing_but_a_question_to_the_trajectories_is_answered(run, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())

    with pytest.raises(ConfigError, match="sql ['\"]"):
        query_trajectories(run, sql)

    assert set(tmp_path.iterdir()) == before


# --- many runs, and what is read of them


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``three_runs``, only to be read."""
    return three_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def own_runs(tmp_path):
    """``three_runs``, to do with as one likes."""
    return three_runs(tmp_path)


def three_runs(folder):
    """Three runs. ``c`` adopted the rows of ``a``, so its shards say run_id = 'a'; of ``b`` a rollout is unfinished.

    run  iteration  sample  answer  reward  stop
    a    1          0       a10     -1      length
    a    1          1       ä11 🙂   -       error
    a    2          0       a20     1       eos
    b    1          0       b10     0.5     eos
    c    1          0       a10     -       length
    c    1          1       ä11 🙂   -       error
    """
    a, b, c = (RunStore(run_id, str(folder)) for run_id in "abc")
    first = [
        trajectory(run_id="a", answer="a10", stop_reason=StopReason.LENGTH, label=None),
        trajectory(run_id="a", sample=1, answer="ä11 🙂", stop_reason=StopReason.ERROR, error="boom"),
    ]
    failed = RewardRow("g0", 1, RewardResult(RewardStatus.SKIPPED, error="boom"))
    finish(a, 1, first, [reward_row(reward=-1.0, metrics={"exact": 0.0}), failed])
    finish(a, 2, [trajectory(run_id="a", iteration=2, answer="a20")], [reward_row(reward=1.0)])
    finish(b, 1, [trajectory(run_id="b", answer="b10")], [reward_row(reward=0.5)])
    b.publish_trajectories(2, [trajectory(run_id="b", iteration=2, answer="unfinished")])
    finish(c, 1, first, None)
    return [a, b, c]


def finish(run, iteration, rows, rewards):
    about = {"iteration": iteration, "run_id": run.run_id}
    run.commit(manifest([run.publish_trajectories(iteration, rows)], **about))
    if rewards is not None:
        run.commit(manifest([run.publish_rewards(iteration, rewards)], Stage.REWARD, **about))


@pytest.fixture
def decoded(monkeypatch):
    """(run, iteration, stage, columns) of every part that is decoded, in turn."""
    found = []
    decode = RunStore.decode_part

    def spy(self, part, data, expected, columns=None):
        found.append((self.run_id, *part.path.split("/")[1:3], tuple(columns or ())))
        return decode(self, part, data, expected, columns)

    monkeypatch.setattr(RunStore, "decode_part", spy)
    return found


def test_many_runs_are_one_dataset_and_rows_belong_to_the_run_whose_log_holds_them(runs):
    table = trajectories(runs, columns=["run_id", "iteration", "answer", "reward"])

    assert [tuple(row.values()) for row in table.to_pylist()] == [
        ("a", 1, "a10", -1.0),
        ("a", 1, "ä11 🙂", None),
        ("a", 2, "a20", 1.0),
        ("b", 1, "b10", 0.5),
        ("c", 1, "a10", None),
        ("c", 1, "ä11 🙂", None),
    ]


@pytest.mark.parametrize(
    "where",
    [
        "reward < 0",
        "reward > 0.5",
        "reward >= 0.5 and reward <= 0.5",
        "reward between -1 and 0.6",
        "reward is null",
        "not (reward < 0)",
        "reward not in (1, 0.5)",
        "reward in (1, 0.5) or stop_reason = 'length'",
        "reward < 0 and stop_reason = 'length'",
        "reward < 0 and stop_reason = 'eos'",
        "reward_status = 'skipped' or run_id = 'c'",
        "reward_status <> 'ok'",
        "reward_error is not null and answer like 'ä%'",
        "run_id in ('b', 'c') and iteration <> 2",
        "run_id > 'a' and batch = 1",
        "iteration = 2",
        "label is null",
        "coalesce(reward, -7) < -1",
        "reward_metrics['exact'] = 0",
        "list_sum(token_ids) > 10 and len(rollout_logprobs) = tokens",
        "answer = 'ä11 🙂'",
        "reward = (select max(reward) from trajectories)",
        "length(answer) > 3 and version_min = 7",
    ],
)
def test_what_is_left_unread_changes_no_answer(runs, where):
    """The same condition, asked of all rows after they were read."""
    everything = trajectories(runs, columns=list(COLUMNS))
    with duckdb.connect() as connection:
        connection.register("trajectories", everything)
        expected = connection.sql(f"select run_id, batch, answer from trajectories where ({where})").to_arrow_table()

    found = trajectories(runs, where=where, columns=["run_id", "batch", "answer"])

    assert found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    ("where", "read"),
    [
        ("run_id = 'b'", ["b 1 rollout"]),
        ("iteration = 2 and run_id <> 'b'", ["a 2 rollout"]),
        ("reward < -5", ["a 1 reward", "a 2 reward", "b 1 reward", "c 1 rollout"]),
        ("reward <= -1 and batch = 1 and run_id = 'a'", ["a 1 reward", "a 1 rollout"]),
        ("reward_status = 'timed_out' and run_id < 'c'", ["a 1 reward", "a 2 reward", "b 1 reward"]),
    ],
)
def test_what_cannot_match_is_not_read(runs, decoded, where, read):
    trajectories(runs, where=where, columns=["answer"])

    assert list(dict.fromkeys(" ".join((run, str(int(i)), stage)) for run, i, stage, _ in decoded)) == read


def test_a_row_that_was_never_scored_keeps_the_reward_of_its_executor(local_run):
    rows = [trajectory(), trajectory(sample=1, reward=5.0, answer="own")]
    finish(local_run, 1, rows, [reward_row(reward=0.0)])

    assert trajectories(local_run, where="reward = 5", columns=["answer"])["answer"].to_pylist() == ["own"]


def test_columns_that_nobody_asks_for_are_not_decoded(runs, decoded):
    trajectories(runs[1], where="stop_reason = 'length'", columns=["answer", "token_ids"])
    trajectories(runs[1], where="stop_reason = 'eos'", columns=["answer"])

    assert [columns for *_, columns in decoded] == [("stop_reason",), ("stop_reason",), ("answer",)]


def test_counting_decodes_nothing(runs, decoded):
    counts = query_trajectories(runs, "select run_id, count(*) as n from trajectories group by all order by all")

    assert counts.to_pylist() == [{"run_id": "a", "n": 3}, {"run_id": "b", "n": 1}, {"run_id": "c", "n": 2}]
    assert decoded == []


def test_a_table_may_be_joined_with_itself(runs):
    pairs = query_trajectories(
        runs[0],
        "select l.answer as worse, r.answer as better from trajectories l join trajectories r "
        "on l.prompt_id = r.prompt_id and l.reward < r.reward",
    )

    assert pairs.to_pylist() == [{"worse": "a10", "better": "a20"}]


def test_order_and_limit(runs):
    best = trajectories(runs, order_by="reward desc nulls last, answer", limit=2, columns=["answer"])

    assert best["answer"].to_pylist() == ["a20", "b10"]


@pytest.mark.parametrize("stage", [Stage.ROLLOUT, Stage.REWARD])
def test_a_damaged_shard_is_named_and_may_be_left_out(own_runs, stage, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("rlhf_core"), "propagate", True)
    (part,) = own_runs[0].stage(1, stage)[0].parts
    path = own_runs[0].objects.local_path(part.path)
    path.write_bytes(path.read_bytes()[:-9] + bytes([path.read_bytes()[-9] ^ 1]) + path.read_bytes()[-8:])

    with pytest.raises(CorruptShardError, match=f"{part.path} is damaged"):
        trajectories(own_runs)
    kept = trajectories(own_runs, columns=["answer", "reward"], skip_damaged=True)

    assert kept["answer"].to_pylist() == ["a20", "b10", "a10", "ä11 🙂"]
    assert f"left out: {own_runs[0].url_of(part.path)} is damaged" in caplog.text


def test_a_damaged_manifest_is_named_and_may_be_left_out(own_runs):
    path = own_runs[1].objects.local_path("iterations/00000001/rollout.json")
    path.write_bytes(path.read_bytes().replace(b'"rows":1', b'"rows":2'))

    with pytest.raises(CorruptShardError, match=r"rollout.json is damaged"):
        trajectories(own_runs)

    assert len(trajectories(own_runs, skip_damaged=True)) == 5


# --- runs by name


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], ["a", "b", "c"]),
        (["*"], ["a", "b", "c"]),
        (["[ab]"], ["a", "b"]),
        (["c", "?", "a"], ["c", "a", "b"]),
        (["{root}/[bc]", "{root}/a"], ["b", "c", "a"]),
    ],
)
def test_runs_are_found_by_id_url_and_pattern(own_runs, names, found):
    root = own_runs[0].root
    for run in own_runs:
        run.write_run({"run_id": run.run_id})
    RunStore("no-run", root).objects.put("other.json", b"{}")

    assert [run.run_id for run in find_runs([name.format(root=root) for name in names], root)] == found


def test_a_pattern_that_fits_no_run_names_those_there_are(own_runs):
    own_runs[0].write_run({"run_id": "a"})

    with pytest.raises(ConfigError, match=r"no run 'z\*' below .*: there are a; name their storage.root with --root"):
        find_runs(["z*"], own_runs[0].root)
