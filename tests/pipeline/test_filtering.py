"""Whole runs whose batches are filled in rounds: 14 prompts, batches of 4, drawn 6 at a time, groups filtered by their mean.

run        what it is for
straight   what a filtered and over-sampled run leaves behind
broken     stopped between two rounds of one batch, and started again: the same, bit for bit
"""

import pytest

from flows.train import train
from rlhf_core.records import Stage
from rlhf_core.storage import CheckpointStore, RunStore, trajectories
from tasks import filling

pytestmark = [pytest.mark.examples, pytest.mark.pipeline, pytest.mark.stack, pytest.mark.timeout(600)]

LOW = 0.031  # about half of the groups of the untrained policy

SMALL = [
    "data.prompt_dataset=configs/tasks/digits.py:prompts?count=14",
    "rollout.batch_size=4",
    "rollout.vllm_generate_batch_size=6",
    "rollout.n_samples_per_prompt=4",
    "rollout.max_new_tokens=16",
    "algo.dynamic_filtering_enable=true",
    f"algo.dynamic_filtering_range=[{LOW}, 1.0]",
    "eval.dataset=[]",
    "ckpt.save_hf=false",
    "run.cpu_threads=1",
]


class Stopped(Exception):
    """The flow's process is told to stop."""


@pytest.fixture(scope="module")
async def runs(prefect_api, ray_cluster, tmp_path_factory):
    root = str(tmp_path_factory.mktemp("filtered"))
    overrides = [*SMALL, f"storage.root={root}"]
    result = await train("grpo_tiny_cpu.yaml", overrides, "straight")
    played = filling.play_round

    async def stops(run, batch):
        if batch.rounds:
            raise Stopped
        return await played(run, batch)

    filling.play_round = stops
    try:
        with pytest.raises(Stopped):
            await train("grpo_tiny_cpu.yaml", overrides, "broken")
    finally:
        filling.play_round = played
    await train("grpo_tiny_cpu.yaml", overrides, "broken", "must")
    return result, RunStore("straight", root), RunStore("broken", root)


def bodies(store, stage):
    return [store.stage(k, stage)[0].body for k in store.completed_iterations()]


async def test_every_prompt_is_accounted_for_and_the_run_ends_with_the_data(runs) -> None:
    result, store, _ = runs

    total = bodies(store, Stage.EXPERIENCE)[-1]["ledger_total"]

    assert total["drawn"] == 14 == total["trained"] + total["filtered"]
    assert min(total["trained"], total["filtered"]) > 0
    assert result["version"] == len(store.completed_iterations())
    assert CheckpointStore(store).versions() == [result["version"]]


async def test_only_groups_inside_the_range_are_trained(runs) -> None:
    _, store, _ = runs

    scores: dict[str, list[float]] = {}
    for row in trajectories(store).to_pylist():
        scores.setdefault(row["group_id"], []).append(row["score"])

    trained = [group["group_id"] for body in bodies(store, Stage.ROLLOUT) for group in body["selected"]]
    assert sorted(trained) == sorted(scores)
    assert all(len(of_group) == 4 and LOW < sum(of_group) / 4 < 1 for of_group in scores.values())


async def test_every_batch_is_full_but_the_last(runs) -> None:
    _, store, _ = runs

    sizes = [len(body["selected"]) for body in bodies(store, Stage.ROLLOUT)]

    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert [store.stage(k, Stage.EXPERIENCE)[0].rows for k in store.completed_iterations()] == [4 * n for n in sizes]


async def test_a_run_stopped_between_rounds_becomes_the_same_run(runs) -> None:
    _, straight, broken = runs

    for stage, key in ((Stage.ROLLOUT, "selected"), (Stage.EXPERIENCE, "ledger_total"), (Stage.UPDATE, "digest")):
        assert [body[key] for body in bodies(broken, stage)] == [body[key] for body in bodies(straight, stage)]
    assert [len(broken.rounds(k)) for k in broken.iterations()] == [
        len(straight.rounds(k)) for k in straight.iterations()
    ]
