"""Whole supervised runs in one process, on real parts: Prefect server, MLflow server, Ray, DeepSpeed.

run          method         what it is for
sft          sft            everything that a run leaves behind
disturbed    sft            a rank is killed on the way: the same weights after every iteration
moved        sft            broken off on two ranks, resumed on one and without ZeRO
scored       reward_model   starts from the checkpoint of sft; the best version is marked
preferred    dpo            starts from the checkpoint of sft, which is its reference too
"""

import asyncio

import numpy as np
import pytest
import ray
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from victims import kill

from flows.dpo import dpo
from flows.reward_model import reward_model
from flows.sft import sft
from rlhf_core.errors import ConfigError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, RunStore, best_pointer, read_worlds

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

TASK = "configs/tasks/preferences.py"
FLOWS = {"sft": sft, "reward_model": reward_model, "dpo": dpo}
ITERATIONS = 3  # 96 examples, 2 epochs of 3 steps of 32, 2 steps an iteration


def config(model, rows, **sections):
    return {
        "model": {"model_name_or_path": model, "adam": {"lr": 3e-3}, "lr_scheduler": "constant", "lr_warmup_ratio": 0},
        "data": {"dataset": f"{TASK}:{rows}?count=96", "apply_chat_template": True, "max_len": 128},
        "train": {"batch_size": 32, "micro_batch_size": 32, "max_epochs": 2, "steps_per_iteration": 2},
        "eval": {"dataset": f"{TASK}:{rows}?count=16&split=test", "steps": 1},
        "ds": {"param_dtype": "fp32"},
        "run": {"device": "cpu", "cpu_threads": 1},
        **sections,
    }


@pytest.fixture(scope="session")
def root(s3):
    """These runs lie in a bucket."""
    return f"s3://{s3.bucket}/supervised"


@pytest.fixture(scope="session")
def curves(tmp_path_factory):
    """Where the runs draw."""
    return tmp_path_factory.mktemp("curves")


@pytest.fixture(scope="session")
def finish(prefect_api, mlflow_uri, ray_cluster, root, curves):
    """Run something to its end, each run once per session."""
    done = {}

    async def run(method, run_id, model="builtin:tiny", rows="sft", **sections):
        if run_id not in done:
            places = [f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}", f"logger.tensorboard_dir={curves}"]
            result = await FLOWS[method](config(model, rows, **sections), places, run_id)
            assert result["version"] == ITERATIONS
            done[run_id] = RunStore(run_id, root)
        return done[run_id]

    return run


def updates(store):
    return [store.stage(k, Stage.UPDATE)[0].body for k in range(ITERATIONS)]


def digests(store):
    return [body["digest"] for body in updates(store)]


async def test_a_run_leaves_its_log_checkpoint_and_evaluations(finish) -> None:
    store = await finish("sft", "sft")

    assert [(body["first_step"], body["steps"], body["optimizer_steps"]) for body in updates(store)] == [
        (0, 2, 2),
        (2, 2, 4),
        (4, 2, 6),
    ]
    losses = [store.read_evaluation(version)["metrics"]["eval/loss"] for version in range(ITERATIONS + 1)]
    assert losses[-1] < losses[0] - 0.5
    body = CheckpointStore(store).get(ITERATIONS)
    assert body["digest"] == digests(store)[-1]
    assert {"hf/model.safetensors", "state/trainer.json"} <= {entry["path"] for entry in body["files"]}
    document = store.read_run()
    assert (document["kind"], document["plan"]["examples"]) == ("sft", 96)


async def test_a_finished_run_is_not_trained_again(finish, mlflow_uri, root) -> None:
    store = await finish("sft", "sft")
    before = digests(store)

    await sft(config("builtin:tiny", "sft"), [f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}"], "sft")

    assert digests(store) == before
    assert store.iterations() == list(range(ITERATIONS))


async def test_tensorboard_has_its_curves(finish, curves) -> None:
    store = await finish("sft", "sft")

    reader = EventAccumulator(str(curves / "sft"))
    reader.Reload()
    losses = [body["metrics"]["train/loss"] for body in updates(store)]
    points = [(point.step, point.value) for point in reader.Scalars("train/loss")]
    assert points == [(k, pytest.approx(loss)) for k, loss in enumerate(losses)]
    assert [point.step for point in reader.Scalars("eval/loss")] == list(range(ITERATIONS + 1))


async def test_another_configuration_or_method_is_refused(finish, root) -> None:
    await finish("sft", "sft")

    with pytest.raises(ConfigError, match=r"train.batch_size: 32 in the run, 16 now"):
        await sft(config("builtin:tiny", "sft"), [f"storage.root={root}", "train.batch_size=16"], "sft")
    with pytest.raises(ConfigError, match="is a run of kind 'sft', not 'dpo'"):
        await dpo(config("builtin:tiny", "pairs"), [f"storage.root={root}"], "sft")


@pytest.mark.examples
async def test_a_killed_rank_is_made_again_and_changes_nothing(finish, root) -> None:
    calm = await finish("sft", "sft")
    disturbed = RunStore("disturbed", root)

    async def kill_after_the_first_iteration():
        while disturbed.stage(0, Stage.UPDATE) is None:
            await asyncio.sleep(0.01)
        kill("ray::SupervisedWorker")

    killing = asyncio.create_task(kill_after_the_first_iteration())
    await finish("sft", "disturbed")
    await killing

    assert digests(disturbed) == digests(calm)
    assert CheckpointStore(disturbed).get(ITERATIONS)["digest"] == digests(calm)[-1]


@pytest.mark.examples
async def test_a_run_of_two_ranks_goes_on_with_one(finish, mlflow_uri, root, tmp_path) -> None:
    """The ranks of the first attempt live on; those that the run no longer has are ended too."""
    calm, store = await finish("sft", "sft"), RunStore("moved", root)
    places = [
        f"storage.root={root}",
        f"logger.mlflow_uri={mlflow_uri}",
        "ckpt.save_steps=1",
        "ds.use_universal_ckpt=true",
    ]
    settings = config("builtin:tiny", "sft")

    first = asyncio.create_task(sft(settings, [*places, "model.num_gpus_per_node=2", "ds.zero_stage=3"], "moved"))
    while CheckpointStore(store).get(1) is None:
        assert not first.done(), first.exception()
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert {"model-0", "model-1"} <= living("moved")
    reached = len(store.completed_iterations())
    assert reached < ITERATIONS
    result = await sft(settings, [*places, "ds.zero_stage=0"], "moved")

    assert result["version"] == ITERATIONS
    assert [world.since for world in read_worlds(store)] == [0, reached]
    assert not living("moved")
    for version in range(reached, ITERATIONS + 1):
        assert CheckpointStore(store).get(version)["universal"]
    weights, expected = (exported(run, tmp_path / run.run_id) for run in (store, calm))
    for name, weight in expected.items():
        assert np.linalg.norm(weights[name] - weight) < 1e-5 * np.linalg.norm(weight), name


def living(run_id):
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == f"rlhf-{run_id}"}


def exported(store, folder):
    CheckpointStore(store).download(ITERATIONS, folder, "hf")
    return {name: weight.numpy() for name, weight in load_file(folder / "model.safetensors").items()}


async def test_a_reward_model_starts_from_the_fine_tuned_model(finish) -> None:
    source = await finish("sft", "sft")

    store = await finish(
        "reward_model", "scored", "run:sft", "pairs", ckpt={"best_metric_key": "eval/loss", "best_metric_mode": "min"}
    )

    model = store.read_run()["models"]["policy"]
    assert (model["run"], model["version"]) == ("sft", ITERATIONS)
    assert model["url"] == CheckpointStore(source).url(ITERATIONS)
    losses = {version: store.read_evaluation(version)["metrics"]["eval/loss"] for version in range(1, ITERATIONS + 1)}
    assert best_pointer(store).version == min(losses, key=losses.get)
    assert "eval/accuracy" in store.read_evaluation(0)["metrics"]


async def test_dpo_begins_at_its_reference(finish) -> None:
    await finish("sft", "sft")

    store = await finish("dpo", "preferred", "run:sft", "pairs")

    first = store.read_evaluation(0)["metrics"]
    assert first["eval/loss"] == pytest.approx(0.693147, abs=1e-5)  # -log sigmoid(0): policy and reference agree
    assert store.read_evaluation(ITERATIONS)["metrics"]["eval/loss"] < first["eval/loss"]


async def test_the_tracker_knows_where_a_model_comes_from(finish, mlflow_uri) -> None:
    from mlflow import MlflowClient

    source = await finish("sft", "sft")
    await finish("dpo", "preferred", "run:sft", "pairs")

    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("rlhf")
    [run] = client.search_runs([experiment.experiment_id], "attributes.run_name = 'preferred'")
    assert run.info.status == "FINISHED"
    [dataset] = {entry.dataset.name for entry in run.inputs.dataset_inputs}
    assert dataset == "preferred/examples"
    [model] = [m for m in client.search_logged_models([experiment.experiment_id]) if m.name.startswith("preferred-v")]
    assert CheckpointStore(source).url(ITERATIONS) in str(model.tags | model.params)
