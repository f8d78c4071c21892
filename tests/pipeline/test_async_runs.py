"""Asynchronous runs on real parts, through the real flows.

run        pipeline                     what it is for
on-policy  async, Q = 0                 bit for bit the synchronous run of the same seed (case 30)
async      async, Q = 1                 flow runs overlap, lag 1; evaluations and best checkpoint are of one version (case 4)
partial    async + partial rollout      an iteration closes when its batch is full, the rest goes on; spans show both versions
"""

from itertools import pairwise

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from flows.train import train
from rlhf_core.records import Ledger, Part, Stage
from rlhf_core.storage import CheckpointStore, RunStore

pytestmark = [pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

CONFIG = "configs/grpo_tiny_cpu.yaml"
SMALL = [
    "train.max_iterations=4",
    "rollout.batch_size=6",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=48",
    "eval.dataset=configs/tasks/digits.py:prompts?count=4&seed=9",
    "eval.steps=1",
    "ckpt.save_steps=-1",
    "ckpt.best_metric_key=eval/score_mean",
    "run.cpu_threads=1",
]
ASYNC = ["train.async_enable=true"]
PARTIAL = [
    *ASYNC,
    "train.partial_rollout_enable=true",
    "train.async_queue_size=3",
    "rollout.vllm_generate_batch_size=12",
    "vllm.max_num_seqs=8",  # two groups at a time: when a batch of six is full, as much is left to do, and is at every sync
    "rollout.max_new_tokens=128",
    "data.max_len=256",
]


@pytest.fixture(scope="module")
def run(prefect_api, ray_cluster, tmp_path_factory):
    """Runs to its end; returns the log."""

    async def finish(run_id, *overrides):
        root = str(tmp_path_factory.mktemp("async"))
        await train(CONFIG, [*SMALL, f"storage.root={root}", *overrides], run_id)
        return RunStore(run_id, root)

    return finish


def manifests(store, stage):
    return [store.stage(k, stage)[0] for k in store.completed_iterations()]


def trained_rows(store, manifest):
    rows = store.read_trajectories(manifest.parts)
    return [row for row in rows if manifest.selected is None or row.group_id in manifest.selected]


def lags(store):
    """Of each trained token's span, per iteration: versions behind the policy that trained on it."""
    return [
        {manifest.iteration - span.version for row in trained_rows(store, manifest) for span in row.version_spans}
        for manifest in manifests(store, Stage.ROLLOUT)
    ]


def check_ledgers(store):
    for manifest in manifests(store, Stage.EXPERIENCE):
        assert Ledger(**manifest.body["ledger"]).balanced
        assert Ledger(**manifest.body["ledger_total"]).balanced


def check_best(store):
    """The best checkpoint is the version with the best evaluation, and holds the weights that its update left."""
    scores = {v: store.read_evaluation(v)["metrics"]["eval/score_mean"] for v in range(1, 5)}
    best = store.pointer("best")
    assert scores[best["version"]] == best["value"] == max(scores.values())
    saved = CheckpointStore(store).get(best["version"])
    assert saved["digest"] == store.stage(best["version"] - 1, Stage.UPDATE)[0].body["digest"]
    for version in scores:  # every answer was spoken by the version that it is of
        rows = store.read_trajectories([Part(**part) for part in store.read_evaluation(version)["parts"]])
        assert {span.version for row in rows for span in row.version_spans} == {version}


@pytest.mark.examples
async def test_a_lag_of_0_is_the_synchronous_run(run):
    short = "train.max_iterations=2"
    sync = await run("in-turn", short)
    strict = [*ASYNC, "train.async_queue_size=0", "algo.advantage.is_correction_enable=false"]
    on_policy = await run("on-policy", short, *strict)

    assert lags(on_policy) == [{0}] * 2
    digests = [[manifest.body["digest"] for manifest in manifests(store, Stage.UPDATE)] for store in (sync, on_policy)]
    assert digests[0] == digests[1]


async def test_iterations_overlap_and_the_lag_is_bounded(run):
    store = await run("overlapping", *ASYNC)

    assert lags(store)[0] == {0}
    assert all(lag in ({0}, {1}) for lag in lags(store))  # {0}: the update was quicker than the next rollout's start
    assert {1} in lags(store)
    check_ledgers(store)
    check_best(store)
    async with get_client() as client:
        iterations = FlowRunFilter(name=FlowRunFilterName(like_="overlapping iteration"))
        runs = await client.read_flow_runs(flow_run_filter=iterations)
        tasks = {task.name: task for task in await client.read_task_runs(flow_run_filter=iterations)}
    assert [each.state.name for each in runs] == ["Completed"] * 4
    # Of the tasks: a flow run begins before its turn.
    assert any(tasks[f"rollout {k + 1}"].start_time < tasks[f"update {k}"].end_time for k in range(3))
    rollouts = [tasks[f"rollout {k}"] for k in range(4)]
    assert all(earlier.end_time <= later.start_time for earlier, later in pairwise(rollouts))


async def test_what_is_unfinished_goes_on_with_new_weights(run):
    store = await run("continued", *PARTIAL)

    assert all(lag <= {0, 1, 2, 3} for lag in lags(store))
    check_ledgers(store)
    check_best(store)
    rows = [row for manifest in manifests(store, Stage.ROLLOUT) for row in trained_rows(store, manifest)]
    assert len({row.group_id for row in rows}) == 4 * 6  # each group once
    assert any(len(row.version_spans) > 1 for row in rows)
    for row in rows:
        spoken = [span for span in row.version_spans if span.end > span.start]
        assert [span.version for span in spoken] == sorted(span.version for span in spoken)
        assert sum(span.end - span.start for span in spoken) == row.num_actions
