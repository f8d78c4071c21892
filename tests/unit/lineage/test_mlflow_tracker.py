"""A real MLflow on a file of its own."""

import json
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlhf_core.config import parse_config
from rlhf_core.errors import ConfigError
from rlhf_core.lineage import (
    BestRecord,
    CheckpointRecord,
    DatasetRecord,
    ModelCheckpoint,
    NoTracker,
    make_tracker,
)
from rlhf_core.lineage.mlflow.tracker import MlflowTracker, TrackerError, flatten

CONFIG = parse_config(
    {
        "actor": {"model_name_or_path": "builtin:tiny"},
        "data": {"prompt_dataset": "prompts.jsonl"},
        "reward": {"functions": [{"use": "digits", "args": {}}]},
    }
).model_dump(mode="json")
TRAJECTORIES = DatasetRecord(
    "run/rollout-00000000", "s3://bucket/runs/run/iterations/00000000/rollout.json", "ab" * 32, "rollout"
)
MANIFESTS = ["s3://bucket/0/rollout.json", "s3://bucket/1/rollout.json"]


def checkpoint(version, **changes):
    fields = {
        "name": f"run-v{version:08d}",
        "version": version,
        "uri": f"s3://bucket/checkpoints/v{version:08d}",
        "digest": "d1",
        "parent": "builtin:tiny",
        "parents": {"policy": "builtin:tiny", "reference": "s3://bucket/runs/sft/checkpoints/v00000007"},
        "manifests": MANIFESTS,
        "metrics": {"eval/pass@1": 0.5},
        "ended_at": 500.0,
    }
    return CheckpointRecord(**(fields | changes))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder and the URI of a database in it; artifacts go to the working directory's mlruns."""
    folder = tmp_path_factory.mktemp("mlflow")
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    yield folder, f"sqlite:///{folder / 'mlflow.db'}"
    patch.undo()


@pytest.fixture(scope="module")
def client(place):
    return MlflowClient(tracking_uri=place[1])


@pytest.fixture(scope="module")
def tracker(place):
    tracker = make_tracker(place[1], "tests")
    tracker.start("run", CONFIG, {"rlhf.storage": "s3://bucket/runs/run"})
    return tracker


@pytest.fixture
def run(client, tracker):
    """Reads the MLflow run as it is now."""
    return lambda: client.get_run(tracker._run_id)


def history(client, tracker, name):
    return [(m.step, m.value, m.timestamp) for m in client.get_metric_history(tracker._run_id, name)]


def test_the_run_is_described(tracker, run):
    data = run().data

    assert run().info.run_name == "run"
    assert data.params["actor.adam.lr"] == "1e-06"
    assert data.params["data.prompt_dataset"] == "['prompts.jsonl']"
    assert len(data.params) > 100  # more than one request may carry
    assert (data.tags["rlhf.run_id"], data.tags["rlhf.storage"]) == ("run", "s3://bucket/runs/run")


def test_the_configuration_is_kept_whole(place, client, tracker):
    path = client.download_artifacts(tracker._run_id, "config.json", str(place[0]))

    assert json.loads(Path(path).read_text()) == CONFIG


def test_starting_again_finds_the_run(place, client, tracker):
    again = MlflowTracker(place[1], "tests")

    again.start("run", CONFIG, {"rlhf.worlds": "from version 3: ds.zero_stage=3"})

    assert again._run_id == tracker._run_id
    assert client.get_run(again._run_id).data.tags["rlhf.worlds"] == "from version 3: ds.zero_stage=3"
    assert len(client.search_runs([tracker._experiment_id])) == 1


def test_a_start_that_was_cut_off_is_completed_by_the_next(place, client):
    """The server went away between making the run and taking its configuration."""
    first = MlflowTracker(place[1], "cut-off")
    first._tell_config = lambda config: (_ for _ in ()).throw(TrackerError("away"))
    with pytest.raises(TrackerError):
        first.start("cut", CONFIG, {})
    again = MlflowTracker(place[1], "cut-off")

    again.start("cut", CONFIG, {})

    assert again._run_id == first._run_id
    assert client.get_run(again._run_id).data.params["train.seed"] == "42"
    assert again.logged_iterations() == 0


def test_an_iteration_is_told_once(client, tracker):
    for _ in range(2):
        tracker.log_iteration(0, {"reward/mean": 0.25}, [TRAJECTORIES], ended_at=100.5)

    assert history(client, tracker, "reward/mean") == [(0, 0.25, 100500)]
    assert tracker.logged_iterations() == 1


def test_a_series_over_iterations(client, tracker):
    for iteration in (1, 2):
        tracker.log_iteration(iteration, {"series": float(iteration)}, [], ended_at=100.0 + iteration)

    assert history(client, tracker, "series") == [(1, 1.0, 101000), (2, 2.0, 102000)]
    assert tracker.logged_iterations() == 3


def test_trajectories_are_a_dataset_input(tracker, run):
    """Told twice above, kept once."""
    [found] = run().inputs.dataset_inputs

    assert (found.dataset.name, found.dataset.digest) == (TRAJECTORIES.name, TRAJECTORIES.digest[:36])
    assert TRAJECTORIES.uri in found.dataset.source
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "rollout")]


def test_an_evaluation_is_told_once(client, tracker):
    for _ in range(2):
        tracker.log_evaluation(3, {"eval/score_mean": 0.75}, ended_at=300.0)

    assert history(client, tracker, "eval/score_mean") == [(3, 0.75, 300000)]


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("timing(s)/gen", "timing_x28s_x29/gen"),
        ("val/mean@8", "val/mean_at_8"),
        ("a,b", "a_x2cb"),
        ("größe", "gr_xf6_xdfe"),
        ("reward_log//odd/../name", "reward_log/_/odd/_x2e./name"),
        ("x" * 300, "x" * 250),
    ],
)
def test_odd_metric_names_are_recorded(client, tracker, name, mapped):
    """CASE 116"""
    tracker.log_evaluation(4, {name: 1.5}, ended_at=400.0)

    assert history(client, tracker, mapped) == [(4, 1.5, 400000)]


def test_a_checkpoint_is_a_model_that_names_its_shards(client, tracker):
    for _ in range(2):
        tracker.log_checkpoint(checkpoint(5))

    [model] = client.search_logged_models([tracker._experiment_id], "name = 'run-v00000005'")
    assert model.status == "READY"
    assert model.tags["trajectories"].splitlines() == MANIFESTS
    assert model.params == {
        "uri": "s3://bucket/checkpoints/v00000005",
        "policy_version": "5",
        "parent": "builtin:tiny",
        "parents": '{"policy": "builtin:tiny", "reference": "s3://bucket/runs/sft/checkpoints/v00000007"}',
        "weight_digest": "d1",
    }
    assert [(m.key, m.value, m.step) for m in model.metrics] == [("eval/pass_at_1", 0.5, 5)]


def test_a_checkpoint_that_was_cut_off_is_completed_by_the_next_call(client, tracker):
    tracker._create_model(checkpoint(6))

    tracker.log_checkpoint(checkpoint(6))

    [model] = client.search_logged_models([tracker._experiment_id], "name = 'run-v00000006'")
    assert (model.status, [m.value for m in model.metrics]) == ("READY", [0.5])


def test_one_checkpoint_at_a_time_is_the_best(place, client, tracker, run):
    """Told by two processes: the second knows nothing of what the first told."""
    for version in (21, 22):
        tracker.log_checkpoint(checkpoint(version))
    tracker.log_best(BestRecord("run-v00000021", 21, "eval/score_mean", 0.5))
    again = MlflowTracker(place[1], "tests")
    again.start("run", CONFIG, {})

    for _ in range(2):
        again.log_best(BestRecord("run-v00000022", 22, "eval/score_mean", 0.75))

    models = client.search_logged_models([tracker._experiment_id])
    assert [model.name for model in models if model.tags.get("best") == "true"] == ["run-v00000022"]
    told = {name: value for name, value in run().data.tags.items() if name.startswith("rlhf.best")}
    assert told == {
        "rlhf.best_version": "22",
        "rlhf.best_metric": "eval/score_mean",
        "rlhf.best_value": "0.75",
    }


def test_many_manifests_are_counted_where_they_do_not_fit(client, tracker):
    tracker.log_checkpoint(checkpoint(7, manifests=[f"s3://bucket/{i:08d}/rollout.json" for i in range(1000)]))

    [model] = client.search_logged_models([tracker._experiment_id], "name = 'run-v00000007'")
    assert model.tags["trajectory_manifests"] == "1000"
    assert len(model.tags["trajectories"]) == 8000


def test_the_end(tracker, run):
    tracker.finish(succeeded=False)
    failed = run().info.status
    tracker.finish(succeeded=True)

    assert (failed, run().info.status) == ("FAILED", "FINISHED")


def test_starting_again_says_that_it_runs(place, tracker, run):
    tracker.finish(succeeded=True)

    MlflowTracker(place[1], "tests").start("run", CONFIG, {})

    assert run().info.status == "RUNNING"


def test_a_secret_of_the_environment_is_nowhere(place, tracker):
    """CASE 119: neither in the database nor in the artifacts."""
    tracker.log_evaluation(9, {"last": 1.0}, ended_at=900.0)

    files = [path for path in place[0].rglob("*") if path.is_file()]
    assert any(path.name == "config.json" for path in files)
    assert [path.name for path in files if b"hush" in path.read_bytes()] == []


def test_a_file_has_no_page(tracker):
    assert tracker.url is None


def test_nothing_is_told_before_the_start(place):
    with pytest.raises(TrackerError, match=r"call start\(\) first"):
        MlflowTracker(place[1], "tests").log_evaluation(0, {}, 0.0)


def test_a_server_that_is_away_is_an_error_soon():
    """With MLflow's own defaults it would be minutes."""
    tracker = make_tracker("http://127.0.0.1:9", "tests")
    start = time.monotonic()

    with pytest.raises(TrackerError, match="MLflow at http://127.0.0.1:9 did not take start"):
        tracker.start("run", CONFIG, {})

    assert time.monotonic() - start < 20
    assert tracker.url is None


def test_a_checkpoint_is_a_version_of_the_registered_model(place, client):
    """Told twice; and what is deleted later says so, as a model and as a version."""
    tracker = make_tracker(place[1], "tests", "registered")
    tracker.start("registered-run", CONFIG, {})
    made = ModelCheckpoint("registered-run", "s3://bucket/runs/r", 1, "s3://bucket/runs/r/v1", "d1")
    for _ in range(2):
        tracker.log_checkpoint(checkpoint(1, name="registered-v1", exported=made))
    tracker.log_checkpoint(checkpoint(2, name="registered-v2"))

    tracker.log_deleted("s3://bucket/runs/r", [2])

    [version] = client.search_model_versions("name='registered'")
    assert (version.run_id, version.tags["rlhf.weight_digest"], version.tags["rlhf.deleted"]) == (
        tracker._run_id,
        "d1",
        "true",
    )
    found = client.search_logged_models([tracker._experiment_id], f"source_run_id = '{tracker._run_id}'")
    assert {model.name: model.tags.get("rlhf.deleted") for model in found} == {
        "registered-v1": "true",
        "registered-v2": None,
    }


@pytest.mark.parametrize("uri", ["http://me:hush@127.0.0.1:9", "https://hush@host"])
def test_a_uri_with_a_credential_is_refused_and_not_repeated(uri):
    """CASE 119"""
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        make_tracker(uri, "tests")

    assert "hush" not in str(caught.value)


def test_without_a_uri_nobody_is_told():
    tracker = make_tracker(None, "tests")

    assert isinstance(tracker, NoTracker)
    assert tracker.logged_iterations() > 10**9


def test_flatten():
    tree = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": {}}

    assert flatten(tree) == {"a.b": "1", "a.c.d": "None", "e": "[1, 2]", "f": "{}"}
