"""Evaluating and saving, over whole runs whose processes follow a script: the log, the checkpoints and the tasks are real."""

import pytest
from task_samples import Holder, complete, open_run

from rlhf_core.errors import ConfigError, LeaseError
from rlhf_core.storage import Best, CheckpointStore, RunStore, best_pointer
from tasks import run as run_module
from tasks.checkpoint import checkpoint
from tasks.due import checkpoint_due, evaluation_due, iterations_to_do
from tasks.evaluate import evaluate

KEY = "eval/score_mean"
EVALUATED = ("eval.dataset=h.jsonl", "eval.steps=1", f"ckpt.best_metric_key={KEY}")


class Workers(Holder):
    """Processes that hold a policy version, score it by a table, and save a file that names it."""

    def __init__(self, store, folder, scores):
        self.store, self.folder, self.scores, self.held = store, folder, scores, 0

    async def heal(self, version, work):
        self.held = version
        return await work()

    async def with_engines(self, oldest, newest, work):
        assert oldest == newest, "an evaluation is of one version"
        self.spoke = newest
        return await work()

    async def with_scoring(self, work):
        return await work()

    async def answer(self, version):
        return (), {"rollout/seconds": 1.0}

    async def judge(self, version, parts):
        score = self.scores[self.spoke]
        return {} if score is None else {KEY: score}, [], []

    async def save(self, version):
        staging = self.folder / f"staging-{version}"
        staging.mkdir(parents=True, exist_ok=True)
        (staging / "weights").write_text(f"weights of {self.held}".ljust(1000))
        return CheckpointStore(self.store).add_files(version, staging)

    async def digests(self):
        return {"digest": f"d{self.held - 1}", "critic_digest": f"c{self.held - 1}"}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Opens the run, or opens it again: only the log is the same."""

    def make(scores, *overrides, iterations=4):
        run = open_run(tmp_path / "runs", *EVALUATED, *overrides, iterations=iterations)
        run.session = Workers(run.store, tmp_path / "work", scores)
        monkeypatch.setitem(run_module._OPEN, "run", run)
        return run

    return make


async def go(run, until=None):
    """What the flows do, up to version ``until``."""
    if evaluation_due(run, 0):
        await evaluate.fn("run", 0)
    for iteration in iterations_to_do(run):
        version = iteration + 1
        if version > (until or run.plan.iterations):
            break
        complete(run, iteration)
        if evaluation_due(run, version):
            await evaluate.fn("run", version)
        if checkpoint_due(run, version):
            await checkpoint.fn("run", version)


def saved(run):
    return CheckpointStore(run.store).versions()


def weights(run, version, tmp_path):
    CheckpointStore(run.store).download(version, tmp_path / "back")
    return (tmp_path / "back" / "weights").read_text().strip()


async def test_case_3_a_worse_model_never_replaces_the_best_one_after_a_resume(start, tmp_path):
    """Evaluations .5 (v1), .8 (v2); save v3; restart; .6 (v4)."""
    scores = [0.0, 0.5, 0.8, 0.7, 0.6]
    await go(start(scores, "ckpt.save_steps=3"), until=3)

    run = start(scores, "ckpt.save_steps=3")
    await go(run)

    assert best_pointer(run.store) == Best(2, 0.8, KEY)
    assert weights(run, 2, tmp_path) == "weights of 2"


async def test_the_best_state_is_in_every_checkpoint(start):
    run = start([0.0, 0.5, 0.8, 0.7, 0.6], "ckpt.save_steps=1")

    await go(run)

    bodies = [CheckpointStore(run.store).get(version)["best"] for version in saved(run)]
    assert [(best["version"], best["value"], best["key"]) for best in bodies] == [
        (1, 0.5, KEY),
        (2, 0.8, KEY),
        (2, 0.8, KEY),
        (2, 0.8, KEY),
    ]


async def test_an_evaluation_names_the_code_that_measured(start):
    for code in ({"mine.py": "first"}, {"mine.py": "mended"}):
        run = start([0.0, 0.5], iterations=1)
        run.user_code = code
        await evaluate.fn("run", 0)

    assert run.store.read_evaluation(0)["user_code"] == {"mine.py": "first"}


async def test_a_checkpoint_names_the_weights_of_every_model_that_learns(start):
    run = start([0.0, 0.5, 0.8, 0.7, 0.6], iterations=2)

    await go(run)

    body = CheckpointStore(run.store).get(2)
    assert (body["digest"], body["critic_digest"]) == ("d1", "c1")


@pytest.mark.parametrize(
    ("mode", "scores", "versions", "best"),
    [
        ("max", [0.9, 0.5, 0.8, 0.7, 0.6], [1, 2, 4], 2),  # v0 does not compete; v4 is the last
        ("max", [0.0, 0.5, 0.5, 0.5, 0.5], [1, 4], 1),
        ("max", [0.0, 0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], 4),
        ("min", [0.0, 0.5, 0.8, 0.4, 0.6], [1, 3, 4], 3),
        ("max", [0.0, None, 0.8, None, 0.6], [2, 4], 2),  # an evaluation without the metric
    ],
)
async def test_a_version_that_is_the_best_is_saved(start, mode, scores, versions, best):
    run = start(scores, f"ckpt.best_metric_mode={mode}")

    await go(run)

    assert saved(run) == versions
    assert best_pointer(run.store).version == best


async def test_case_4_the_best_checkpoint_is_the_version_that_was_evaluated(start, tmp_path):
    """The metric is the version that the engine held."""
    run = start([float(version) for version in range(5)])

    await go(run)

    best = best_pointer(run.store)
    assert weights(run, best.version, tmp_path) == f"weights of {best.value:.0f}"


@pytest.mark.parametrize(
    ("scores", "limits", "versions"),
    [
        ([0, 5, 4, 3, 2], ["ckpt.max_num=1"], [1, 4]),
        ([0, 1, 2, 3, 4], ["ckpt.max_num=1"], [4]),
        ([0, 4, 5, 3, 2], ["ckpt.max_num=2"], [2, 3, 4]),
        ([0, 5, 4, 3, 2], ["ckpt.max_mem=0.000000001"], [1, 4]),  # about a byte
        ([0, 5, 4, 3, 2], ["ckpt.max_mem=1"], [1, 2, 3, 4]),
    ],
)
async def test_rotation_keeps_the_newest_and_the_best(start, scores, limits, versions, tmp_path):
    run = start(scores, "ckpt.save_steps=1", *limits)

    await go(run)

    assert saved(run) == versions
    assert run.store.pointer("latest") == {"version": 4}
    assert weights(run, best_pointer(run.store).version, tmp_path) == f"weights of {best_pointer(run.store).version}"


async def test_without_a_metric_there_is_no_best(start):
    run = start([0.0, 0.5, 0.8, 0.7, 0.6], "ckpt.best_metric_key=null")

    await go(run)

    assert saved(run) == [4]
    assert run.store.pointer("best") is None


@pytest.mark.parametrize("act", ["commit", "latest", "best", "rotate"])
async def test_a_crash_while_saving_the_best_one_is_made_good(start, act, monkeypatch, tmp_path):
    """Killed before that act of saving version 2; the resumed run ends as one that was never killed."""
    scores, limits = [0.0, 0.5, 0.8, 0.7, 0.6], ["ckpt.max_num=1"]
    run = start(scores, *limits)
    await go(run, until=1)
    with monkeypatch.context() as patch:
        kill_before(patch, act)
        with pytest.raises(Killed):
            await go(run, until=2)

    run = start(scores, *limits)
    left = iterations_to_do(run)
    await go(run)

    assert left == ([2, 3] if act == "rotate" else [1, 2, 3])
    assert best_pointer(run.store) == Best(2, 0.8, KEY)
    assert saved(run) == [2, 4]


class Killed(BaseException):
    pass


def kill_before(patch, act):
    def killed(*arguments):
        raise Killed

    if act == "commit":
        patch.setattr(CheckpointStore, "commit", killed)
    elif act == "rotate":
        patch.setattr("tasks.checkpoint.rotate", killed)
    else:
        real = RunStore.set_pointer
        patch.setattr(
            RunStore, "set_pointer", lambda store, name, body: killed() if name == act else real(store, name, body)
        )


async def test_a_crash_between_the_evaluation_and_the_checkpoint_is_made_good(start):
    scores = [0.0, 0.5, 0.8, 0.7, 0.6]
    run = start(scores)
    await go(run, until=1)
    complete(run, 1)
    await evaluate.fn("run", 2)

    run = start(scores)
    await go(run)

    assert saved(run) == [1, 2, 4]


async def test_an_old_iteration_that_is_run_again_changes_nothing(start):
    run = start([0, 1, 5, 4, 3], "ckpt.save_steps=1", "ckpt.max_num=1")
    await go(run)

    for version in (1, 2, 3):
        await checkpoint.fn("run", version)

    assert saved(run) == [2, 4]
    assert run.store.pointer("latest") == {"version": 4}


async def test_a_metric_that_there_is_not_is_refused_before_anything_is_trained(start):
    run = start([0.5] * 5, "ckpt.best_metric_key=eval/score_maen")

    with pytest.raises(ConfigError, match="'eval/score_maen': .* no such metric: use one of eval/score_mean"):
        await go(run)
    assert run.store.read_evaluation(0) is None


async def test_a_process_that_lost_its_lease_deletes_nothing(start):
    run = start([0, 5, 4, 3, 2], "ckpt.save_steps=1", "ckpt.max_num=1")
    await go(run, until=2)
    complete(run, 2)
    await evaluate.fn("run", 3)
    CheckpointStore(run.store).commit(3, {"digest": "d2"}, [])  # by the process that has the lease now
    run.session.lost = True

    with pytest.raises(LeaseError):
        await checkpoint.fn("run", 3)

    assert saved(run) == [1, 2, 3]
