"""Another reward over saved trajectories: what is scored, what is kept, what is compared."""

import json

import pytest
from saved_run import PROMPT, save_run

from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError, CorruptShardError, RewardError
from rlhf_core.records import RewardResult, RewardStatus
from rlhf_core.rewards import make_reward_source
from rlhf_core.rewards.other_source import default_rescoring_name, scorer_of, with_sources
from rlhf_core.rewards.rescore import rescore_iteration
from rlhf_core.rewards.rescore_report import make_report
from rlhf_core.storage.audit.contents import named_objects
from rlhf_core.storage.rescored import Rescoring, existing_rescoring

TWO = [
    [("g0", [("12", 1.0), ("a", 0.0)]), ("g1", [("b", 0.5), (None, None)])],
    [("g2", [("c", 0.2), ("1c", 0.4)])],
]
SCORER = {"functions": [{"use": "mine"}]}


class Scripted:
    """A reward source that follows a script: answer -> reward; an exception is raised, None fails the sample."""

    def __init__(self, script):
        self.script = script
        self.asked = []

    async def score(self, requests):
        self.asked += [request.answer for request in requests]
        return [self._result(self.script(request)) for request in requests]

    async def close(self):
        pass

    def _result(self, value):
        if isinstance(value, BaseException):
            raise value
        if value is None:
            return RewardResult(RewardStatus.ERROR, error="ValueError: a bad answer")
        return RewardResult(RewardStatus.OK, value, value)


def by_length(request):
    return float(len(request.answer))


@pytest.fixture
def store(tmp_path):
    return save_run(tmp_path, TWO)


@pytest.fixture
def rescoring(store):
    rescoring = Rescoring(store, "length")
    rescoring.begin(SCORER)
    return rescoring


async def score(rescoring, script, iterations=(0, 1)):
    source = Scripted(script)
    scored = [await rescore_iteration(rescoring, iteration, source) for iteration in iterations]
    assert sum(scored) == len(source.asked)
    return source.asked


async def test_every_answer_is_scored_once_and_failed_rollouts_are_not(rescoring):
    asked = await score(rescoring, by_length)
    again = await score(rescoring, by_length)

    assert sorted(asked) == ["12", "1c", "a", "b", "c"]
    assert again == []
    assert [(r.group_id, r.sample_index, r.result.reward) for r in rescoring.rewards(0)] == [
        ("g0", 0, 2.0),
        ("g0", 1, 1.0),
        ("g1", 0, 1.0),
        ("g1", 1, None),
    ]
    assert rescoring.rewards(0)[3].result.status is RewardStatus.SKIPPED


async def test_the_source_gets_what_it_gets_in_a_run(rescoring):
    requests = []

    await score(rescoring, lambda request: requests.append(request) or 1.0, [1])

    assert (requests[0].query, requests[0].prompt, requests[0].label) == (f"{PROMPT}c", PROMPT, 2)
    assert requests[0].token_ids[-1] == 258


async def test_an_attempt_that_died_is_gone_on_with(rescoring):
    def dies(request):
        return KeyboardInterrupt() if request.answer == "b" else 7.0

    with pytest.raises(KeyboardInterrupt):
        await score(rescoring, dies)
    asked = await score(rescoring, by_length)

    assert sorted(asked) == ["1c", "b", "c"]  # the first part, g0, was durable
    assert [row.result.reward for row in rescoring.rewards(0)] == [7.0, 7.0, 1.0, None]


async def test_a_damaged_leftover_is_scored_again(rescoring, store, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        await score(rescoring, lambda r: KeyboardInterrupt() if r.answer == "b" else 7.0)
    [left] = (tmp_path / "run" / "rescored" / "length" / "00000000").rglob("*.arrow")
    left.write_bytes(left.read_bytes()[:-5] + b"xxxxx")

    await score(rescoring, by_length)

    assert [row.result.reward for row in rescoring.rewards(0)][:2] == [2.0, 1.0]


async def test_an_iteration_without_any_reward_stops_the_work_and_leaves_nothing(rescoring, tmp_path):
    with pytest.raises(RewardError, match=r"iteration 0: none of its 3 samples .*3 × error: ValueError: a bad answer"):
        await score(rescoring, lambda request: None)

    assert not list((tmp_path / "run" / "rescored").rglob("*.arrow"))
    assert await score(rescoring, by_length)


async def test_failures_beside_successes_are_recorded(rescoring):
    await score(rescoring, lambda request: None if request.answer in ("b", "1c") else by_length(request))

    report = make_report(rescoring, [0, 1], 5).body
    assert report["failures"] == {"error: ValueError: a bad answer": 2}
    assert (report["samples"], report["compared"], report["failed_rollouts"]) == (6, 3, 1)


async def test_only_groups_of_the_batch_are_scored(tmp_path):
    """CASE: filtered groups lie in the same parts."""
    store = save_run(tmp_path, [TWO[0]], selected=[{"group_id": "g1"}])
    rescoring = Rescoring(store, "length")

    asked = await score(rescoring, by_length, [0])

    assert asked == ["b"]
    assert [row.group_id for row in rescoring.rewards(0)] == ["g1", "g1"]


async def test_the_report_names_who_moved_and_keeps_the_picture(rescoring):
    await score(rescoring, lambda request: {"12": 0.0, "a": 5.0}.get(request.answer, 1.0))

    report = make_report(rescoring, [0, 1], moved=2)
    plot = rescoring.write_report(report.body, report.plot)

    first, second = report.body["moved"]
    assert (first["answer"], first["old"], first["new"], first["prompt"]) == ("a", 0.0, 5.0, PROMPT)
    assert (second["answer"], second["moved"]) == ("12", pytest.approx(-1.0))
    assert report.body["pairs_swapped"] == 1 / 2
    assert rescoring.report()["plot"]["sha256"]
    assert json.dumps(report.body)
    assert plot.endswith(".png")


async def test_nothing_of_it_is_garbage(rescoring, store, tmp_path):
    await score(rescoring, by_length)
    report = make_report(rescoring, [0], 3)
    rescoring.write_report(report.body, report.plot)

    named = {named.path for named in named_objects(store)}
    there = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run" / "rescored").rglob("*.*")}
    assert {path for path in there if path.endswith((".arrow", ".png", ".json"))} <= named


async def test_rewards_of_another_rollout_are_refused(rescoring, tmp_path):
    await score(rescoring, by_length, [0])
    elsewhere = save_run(tmp_path / "other", TWO[::-1])
    moved = tmp_path / "other" / "run" / "rescored"
    (tmp_path / "run" / "rescored").rename(moved)

    with pytest.raises(CorruptShardError, match="scores the rollout with sha256"):
        existing_rescoring(elsewhere, "length").rewards(0)


def test_a_name_belongs_to_one_scorer(rescoring):
    rescoring.begin(SCORER)

    with pytest.raises(ConfigError, match=r"holds rewards of another scorer.*another --name"):
        rescoring.begin({"functions": [{"use": "other"}]})


@pytest.mark.parametrize("name", ["", "../up", "a/b", "größe", ".hidden", "x" * 101])
def test_names_that_name_no_folder(store, name):
    with pytest.raises(ConfigError, match="cannot name a rescoring"):
        Rescoring(store, name)


def test_a_rescoring_that_is_not_there(rescoring, store):
    with pytest.raises(ConfigError, match=r"no rescored rewards 'nope'; it has length"):
        existing_rescoring(store, "nope")


# --- which reward


@pytest.fixture
def config(store):
    return parse_config(store.read_run()["config"])


def test_sources_by_their_looks(config, tmp_path):
    (tmp_path / "mine.py").write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)\n")
    (tmp_path / "model").mkdir()
    mine = str(tmp_path / "mine.py")

    reward = with_sources(
        config,
        [
            "length?target=40",
            mine,
            f"{mine}:reward_func",
            "pack.age:function",
            "http://127.0.0.1:5000/",
            str(tmp_path / "model"),
        ],
        ["reward.timeout=5"],
    ).reward

    assert [(f.use, f.args) for f in reward.functions] == [
        ("length", {"target": 40}),
        (mine, {}),
        (f"{mine}:reward_func", {}),
        ("pack.age:function", {}),
    ]
    assert reward.remote_url == ("http://127.0.0.1:5000/",)
    assert (reward.model_name_or_path, reward.timeout) == (str(tmp_path / "model"), 5)


@pytest.mark.parametrize(
    ("sources", "overrides", "message"),
    [
        (["digitz"], [], "'digitz' is no reward: give a built-in"),
        (["ftp://host/x"], [], "is no reward"),
        (["run:a", "run:b"], [], "a second reward model"),
        (["digits"], ["actor.adam.lr=1"], "actor.adam.lr=1: scoring again only takes reward.key=value"),
        (["digits?strip"], [], "arguments are written as name=value"),
        ([], [], "no reward to score with"),
    ],
)
def test_what_is_no_reward(config, sources, overrides, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        with_sources(config, sources, overrides)


def test_a_changed_file_is_another_scorer_with_another_name(config, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)\n")
    before = scorer_of(with_sources(config, [str(file)]), None)
    file.write_text("def reward_func(queries, prompts, labels): return [1.0] * len(queries)\n")
    after = scorer_of(with_sources(config, [str(file)]), None)

    assert before != after
    assert default_rescoring_name(with_sources(config, [str(file)]), "0123456789") == "mine-01234567"
    with pytest.raises(ConfigError, match="no such file"):
        scorer_of(with_sources(config, [f"{tmp_path}/gone.py"]), None)


async def test_a_real_function_in_the_real_pool(rescoring, config):
    source = make_reward_source(with_sources(config, ["length?target=2"]).reward)
    try:
        await rescore_iteration(rescoring, 1, source)
    finally:
        await source.close()

    assert [row.result.status for row in rescoring.rewards(1)] == [RewardStatus.OK] * 2
