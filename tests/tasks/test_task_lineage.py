"""The tracker's view is brought up to date from the log."""

import json
import logging

import pytest
from minimal_config import config
from task_samples import Away, Notebook, complete, facts, open_run

from rlhf_core.errors import RlhfError
from rlhf_core.lineage import BestRecord, DatasetRecord, Measured, ModelCheckpoint
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore
from tasks import run as run_module
from tasks.lineage import iteration_metrics, track
from tasks.opening import run_document
from tasks.plan import make_plan
from tasks.registered import comparable


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Makes a run the open one of this process."""

    def make(*overrides, tracker=None, **changes):
        run = open_run(tmp_path, *overrides, tracker=tracker, **changes)
        monkeypatch.setitem(run_module._OPEN, "run", run)
        return run

    return make


async def tell(insist=False):
    return await track.fn("run", insist)


def test_every_metric_of_an_iteration(tmp_path):
    run = open_run(tmp_path)
    complete(run, 2)

    assert iteration_metrics(run.store, 2) == {
        "policy_version": 3.0,
        **{f"{stage}/number": 2.0 for stage in Stage},
        **{f"seconds/{stage}": 5.0 for stage in Stage},
        "ledger/drawn": 8.0,
        "ledger/trained": 7.0,
        "ledger/failed": 1.0,
        "kl/coef": 0.1,
    }


def test_stages_that_are_not_done_have_no_metrics(tmp_path):
    run = open_run(tmp_path)
    complete(run, 0, stages=(Stage.ROLLOUT,))

    assert set(iteration_metrics(run.store, 0)) == {"policy_version", "rollout/number", "seconds/rollout"}


async def test_a_run_is_introduced_by_its_document(opened):
    run, checked = opened(), config("train.seed=7")
    run.store.write_run(run_document(checked, "run", make_plan(checked, facts(3)), "flow-1"))

    url = await tell()

    [(run_id, told, tags)] = run.tracker.starts
    assert (url, run_id, told["train"]["seed"]) == ("http://tracker/run", "run", 7)
    assert (tags["rlhf.storage"], tags["prefect.flow_run_id"]) == (run.store.url, "flow-1")
    assert "package.python" in tags


async def test_a_replay_is_introduced_with_its_source(opened):
    run, checked = opened(), config()
    document = run_document(checked, "run", make_plan(checked, facts(3)), "flow-1")
    run.store.write_run({**document, "replay": {"source_url": "file:///runs/first"}})

    await tell()

    assert run.tracker.starts[0][2]["rlhf.replay_of"] == "file:///runs/first"


async def test_iterations_are_told_once_with_their_trajectories(opened):
    run = opened()
    complete(run, 0)
    await tell()
    complete(run, 1)
    await tell()
    await tell()

    _, rollout = run.store.stage(1, Stage.ROLLOUT)
    assert [told[0] for told in run.tracker.iterations] == [0, 1]
    assert run.tracker.iterations[1][2] == [
        DatasetRecord("run/rollout-00000001", run.store.url_of(rollout.path), rollout.sha256, "rollout")
    ]


async def test_times_are_those_of_the_log(opened):
    run = opened()
    complete(run, 0, evaluation=0.5, checkpoint=True)

    await tell()

    assert run.tracker.iterations[0][3] == 100.0
    assert run.tracker.evaluations == [(1, {"eval/score_mean": 0.5}, 100.0)]
    assert run.tracker.checkpoints[0].ended_at == 100.0


async def test_a_tracker_that_was_away_is_told_everything_later(opened):
    run = opened(tracker=Away())
    complete(run, 0, evaluation=0.1)
    complete(run, 1, evaluation=0.2, checkpoint=True)
    await tell()
    run.tracker = run.tellings[0].tracker = Notebook()

    await tell()

    assert [told[0] for told in run.tracker.iterations] == [0, 1]
    assert [told[0] for told in run.tracker.evaluations] == [1, 2]
    assert [record.version for record in run.tracker.checkpoints] == [2]


async def test_a_checkpoint_that_comes_after_its_update_was_told_is_told_too(opened):
    """Killed between update and checkpoint; the resumed run tells the update before it saves."""
    run = opened()
    complete(run, 0)
    await tell()
    complete(run, 0, stages=(), checkpoint=True, evaluation=0.5)
    await tell()

    assert [record.version for record in run.tracker.checkpoints] == [1]
    assert [told[0] for told in run.tracker.evaluations] == [1]


async def test_old_versions_are_not_told_again(opened):
    """The work of a call does not grow with the age of the run."""
    run = opened(tracker=Notebook(told=3))
    for iteration in range(3):
        complete(run, iteration, checkpoint=True, evaluation=0.1)

    await tell()

    assert [told[0] for told in run.tracker.evaluations] == [3]
    assert [record.version for record in run.tracker.checkpoints] == [3]


async def test_the_evaluation_before_training_is_told(opened):
    run = opened()
    run.store.write_evaluation(0, {"parts": [], "metrics": {"eval/score_mean": 0.0}, "started_at": 1.0, "seconds": 1.0})

    await tell()

    assert run.tracker.evaluations == [(0, {"eval/score_mean": 0.0}, 2.0)]


async def test_a_checkpoint_names_all_it_was_made_from(opened):
    run = opened()
    for iteration in range(3):
        complete(run, iteration, checkpoint=iteration == 2, evaluation=0.5)

    await tell()

    [record] = run.tracker.checkpoints
    assert (record.name, record.version, record.digest, record.parent) == ("run-v00000003", 3, "d2", "builtin:tiny")
    assert record.uri == run.store.url_of("checkpoints/v00000003")
    assert record.manifests == [run.store.url_of(f"iterations/0000000{k}/rollout.json") for k in range(3)]
    assert record.metrics == {"eval/score_mean": 0.5}


async def test_a_checkpoint_names_every_model_of_the_run(opened):
    """A checkpoint of another run by its URL: the uri of the model that the tracker was told by that run."""
    run = opened()
    url = "s3://bucket/runs/sft/checkpoints/v00000007"
    pinned = {"spec": "run:sft@best", "run": "sft", "version": 7, "digest": "ab", "url": url}
    run.store.write_run({"models": {"policy": pinned, "reference": {"spec": "builtin:tiny"}}})
    complete(run, 0, checkpoint=True)

    await tell()

    [record] = run.tracker.checkpoints
    assert (record.parent, record.parents) == (url, {"policy": url, "reference": "builtin:tiny"})


async def test_a_run_of_before_models_were_recorded_names_those_of_its_configuration(opened):
    run = opened("algo.kl.init_coef=0.1", "ref.model_name_or_path=base")
    run.store.write_run({"config": {}})
    complete(run, 0, checkpoint=True)

    await tell()

    assert run.tracker.checkpoints[0].parents == {"policy": "builtin:tiny", "reference": "base"}


async def test_a_checkpoint_with_an_export_is_told_as_a_model(opened):
    run = opened("eval.dataset=h.jsonl", "ckpt.best_metric_key=eval/score_mean", "ckpt.best_metric_mode=min")
    complete(run, 0, evaluation=0.5)
    CheckpointStore(run.store).commit(1, {"digest": "d0", "started_at": 1.0, "seconds": 1.0}, export(run, 1))

    await tell()

    [record] = run.tracker.checkpoints
    assert record.exported == ModelCheckpoint(
        "run",
        run.store.url,
        1,
        record.uri,
        "d0",
        Measured("eval/score_mean", 0.5, "min", comparable(run.config, {})),
    )
    assert record.exported.spec == f"run:{run.store.url}@1"


async def test_a_checkpoint_without_an_export_is_no_model(opened):
    run = opened()
    complete(run, 0, checkpoint=True)

    await tell()

    assert run.tracker.checkpoints[0].exported is None


def export(run, version):
    folder = run.store.objects.local_path(f"staging-{version}")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return CheckpointStore(run.store).add_files(version, folder, "hf")


@pytest.mark.parametrize(
    ("override", "alike"),
    [
        ("train.seed=9", True),
        ("data.prompt_dataset=other.jsonl", True),
        ("reward.num_workers=9", True),
        ("eval.steps=5", True),
        ("data.image_timeout=9", True),
        ("eval.temperature=1", False),
        ("eval.dataset=other.jsonl", False),
        ("rollout.max_new_tokens=7", False),
        ("data.input_template={} =", False),
        ("reward.functions=[{use: length}]", False),
        ("ckpt.best_metric_key=eval/reward_mean", False),
        ("train.agent_func_path=a.py", False),
    ],
)
def test_what_is_measured_alike(override, alike):
    plain = ("eval.dataset=h.jsonl", "ckpt.best_metric_key=eval/score_mean")

    assert (comparable(config(*plain), {}) == comparable(config(*plain, override), {})) is alike


@pytest.mark.parametrize(
    ("override", "alike"), [("agent.max_processes=9", True), ("agent.max_turns=2", False), ("agent.args={a: 1}", False)]
)
def test_what_an_agent_makes_of_a_model_is_measured_alike(override, alike):
    plain = ("eval.dataset=h.jsonl", "ckpt.best_metric_key=eval/score_mean", "train.agent_func_path=a.py")

    assert (comparable(config(*plain), {}) == comparable(config(*plain, override), {})) is alike


def test_a_mended_reward_measures_otherwise_a_mended_loss_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "loss.py"):
        (tmp_path / name).touch()
    named = config("reward.functions=[{use: mine.py}]", "actor.policy_loss_type=loss.py:loss")
    as_it_is, reward, loss = [
        comparable(named, {"mine.py": f"reward {a}", "loss.py": f"loss {b}"}) for a, b in ((1, 1), (2, 1), (1, 2))
    ]

    assert (as_it_is == reward, as_it_is == loss) == (False, True)


async def test_what_rotation_deleted_is_told_once(opened):
    run = opened("ckpt.max_num=1")
    for iteration in range(2):
        complete(run, iteration, checkpoint=True)
    CheckpointStore(run.store).delete(1)

    await tell()
    await tell()

    assert run.tracker.kept == [[2]]


async def test_the_best_checkpoint_is_told(opened):
    run = opened("eval.dataset=h.jsonl", "ckpt.best_metric_key=eval/score_mean")
    complete(run, 0, checkpoint=True, evaluation=0.5)
    await tell()
    run.store.set_pointer("best", {"version": 1, "value": 0.5, "key": "eval/score_mean"})
    await tell()

    assert run.tracker.best == [BestRecord("run-v00000001", 1, "eval/score_mean", 0.5)]
    assert run.tracker.checkpoints[0].name == "run-v00000001"


async def test_training_goes_on_without_the_tracker(opened, caplog):
    opened(tracker=Away())

    with caplog.at_level(logging.WARNING):
        await tell()

    assert "notebook will be told later: the tracker is away" in caplog.text


async def test_the_last_call_insists(opened):
    opened(tracker=Away())

    with pytest.raises(RlhfError, match="the tracker is away"):
        await tell(insist=True)


async def test_the_end_is_told_at_the_end(opened):
    run = opened()

    await tell()
    before = list(run.tracker.ends)
    await tell(insist=True)

    assert (before, run.tracker.ends) == ([], [True])


async def test_nothing_secret_is_told(opened, monkeypatch):
    """CASE 119: a secret of the environment is not in what the tracker gets."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush-hush")
    run, checked = opened(), config()
    run.store.write_run(run_document(checked, "run", make_plan(checked, facts(3)), "flow-1"))
    complete(run, 0, checkpoint=True, evaluation=0.5)

    await tell(insist=True)

    told = json.dumps([vars(run.tracker), run.store.read_run()], default=str)
    assert "rollout-00000000" in told
    assert "hush" not in told
