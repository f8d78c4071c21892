"""The registry on a real MLflow database of its own.

run a: versions 1 (0.5), 2 (0.7)          run b: version 1 (0.6)          all measured alike, more is better
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mlflow import MlflowClient

from rlhf_core.errors import ConfigError
from rlhf_core.lineage import Measured, ModelCheckpoint, ModelVersion, make_registry
from rlhf_core.lineage.mlflow.client import TrackerError
from rlhf_core.lineage.registry import best_of


def checkpoint(run="a", version=1, value=0.5, comparable="alike", mode="max", digest=None):
    measured = None if value is None else Measured("eval/score_mean", value, mode, comparable)
    url = f"s3://bucket/runs/{run}"
    uri = f"{url}/checkpoints/v{version:08d}"
    return ModelCheckpoint(run, url, version, uri, digest or f"{run}{version}", measured)


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('registry') / 'mlflow.db'}"


@pytest.fixture
def registry(uri, request):
    return make_registry(uri, request.node.name)


@pytest.fixture
def client(uri):
    return MlflowClient(tracking_uri=uri)


def register(registry, *checkpoints):
    return [registry.register(each, "r", "m") for each in checkpoints]


def holder(registry, alias):
    found = registry.version(alias)
    return None if found is None else found.number


def test_told_twice_is_one_version(registry, client, request):
    numbers = register(registry, checkpoint(), checkpoint(version=2, value=0.7), checkpoint())

    assert numbers == [1, 2, 1]
    assert len(client.search_model_versions(f"name='{request.node.name}'")) == 2
    assert registry.find(checkpoint().uri, "a1") == ModelVersion(1, checkpoint())


def test_a_version_says_everything_of_its_checkpoint(registry, client, request):
    register(registry, checkpoint())

    version = client.get_model_version(request.node.name, "1")
    assert (version.source, version.run_id) == (checkpoint().uri, "r")
    assert version.tags == {
        "rlhf.uri": "s3://bucket/runs/a/checkpoints/v00000001",
        "rlhf.weight_digest": "a1",
        "rlhf.run_id": "a",
        "rlhf.run_url": "s3://bucket/runs/a",
        "rlhf.policy_version": "1",
        "rlhf.metric": "eval/score_mean",
        "rlhf.value": "0.5",
        "rlhf.mode": "max",
        "rlhf.measured_as": "alike",
    }
    assert checkpoint().spec == "run:s3://bucket/runs/a@1"


def test_best_and_latest_follow_over_several_runs(registry):
    register(registry, checkpoint(), checkpoint(version=2, value=0.7), checkpoint(run="b", value=0.6))

    assert (holder(registry, "best"), holder(registry, "latest"), holder(registry, "champion")) == (2, 3, None)


def test_the_champion_moves_only_by_promotion(registry):
    register(registry, checkpoint())
    registry.promote(1)
    register(registry, checkpoint(version=2, value=0.9))

    assert (holder(registry, "champion"), holder(registry, "best")) == (1, 2)


def test_deleted_checkpoints_say_so_and_are_the_best_no_more(registry, client, request):
    register(registry, checkpoint(value=0.9), checkpoint(version=2, value=0.7), checkpoint(run="b", value=0.6))

    registry.mark_deleted("s3://bucket/runs/a", [2])

    version = client.get_model_version(request.node.name, "1")
    assert version.tags["rlhf.deleted"] == "true"
    assert "files are deleted" in version.description
    assert (holder(registry, "best"), registry.find(checkpoint().uri, "a1").deleted) == (2, True)
    assert not registry.find(checkpoint(run="b").uri, "b1").deleted


def test_a_run_made_anew_under_its_old_name_gives_another_version(registry):
    assert register(registry, checkpoint(), checkpoint(digest="other")) == [1, 2]


def test_two_processes_that_tell_of_one_checkpoint_at_once_make_one_version(registry, uri, client, request):
    register(registry, checkpoint(run="b"))
    others = [make_registry(uri, request.node.name) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda other: register(other, checkpoint())[0], others))

    assert len(set(numbers)) == 1
    assert [int(v.version) for v in client.search_model_versions(f"name='{request.node.name}'")] == [numbers[0], 1]


def test_runs_that_move_best_at_once_agree_in_the_end(registry, uri, request):
    register(registry, checkpoint(run="z", value=0.1))

    def tell(number):
        return register(make_registry(uri, request.node.name), checkpoint(run=f"r{number}", value=0.2 + number / 10))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tell, range(4)))

    assert registry.version("best").checkpoint.run_id == "r3"


def test_a_model_that_is_not_there_has_no_versions(registry):
    assert (holder(registry, "latest"), registry.find("u", "d")) == (None, None)


def test_versions_of_others_are_nobodys(registry, client, request):
    client.create_registered_model(request.node.name)
    client.create_model_version(request.node.name, "s3://elsewhere", run_id=None)

    assert (holder(registry, "latest"), registry.find("u", "d")) == (None, None)


def test_a_server_that_is_away_is_named():
    registry = make_registry("http://127.0.0.1:9", "away")

    with pytest.raises(
        TrackerError, match="MLflow at http://127.0.0.1:9 did not take alias best .registered model away"
    ):
        registry.version("best")


def test_a_uri_with_a_credential_is_refused():
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        make_registry("http://me:hush@host", "m")


# --- which is the best, worked by hand


def versions(*measured):
    return [ModelVersion(i + 1, checkpoint(version=i + 1, **each)) for i, each in enumerate(measured)]


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([], None),
        ([{"value": None}], None),
        ([{"value": 0.5}, {"value": 0.5}], 1),  # a tie
        ([{"value": 0.5, "mode": "min"}, {"value": 0.4, "mode": "min"}], 2),
        ([{"value": 0.9, "comparable": "old"}, {"value": 0.1}], 2),  # measured otherwise since
        ([{"value": 0.9}, {"value": 0.1, "comparable": "other"}, {"value": 0.2}], 1),
        ([{"value": 0.3}, {"value": None}], 1),
    ],
)
def test_the_best_is_the_best_of_those_that_compare(measured, best):
    found = best_of(versions(*measured))

    assert (None if found is None else found.number) == best


def test_a_checkpoint_that_was_deleted_and_made_again_is_there_again(registry, client, request):
    register(registry, checkpoint(value=0.9), checkpoint(version=2, value=0.7))
    registry.mark_deleted("s3://bucket/runs/a", [2])

    assert register(registry, checkpoint(value=0.9)) == [1]

    assert not registry.find(checkpoint().uri, "a1").deleted
    assert "deleted" not in client.get_model_version(request.node.name, "1").description
    assert holder(registry, "best") == 1
