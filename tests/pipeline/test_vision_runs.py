"""A whole run whose prompts show images, and a replay of it, on real parts."""

import pytest

from flows.replay import replay
from flows.train import train
from rlhf_core.records import Stage
from rlhf_core.storage import RunStore
from rlhf_core.storage.audit.verification import verify
from rlhf_core.vision import from_png

pytestmark = [
    pytest.mark.examples,
    pytest.mark.agents,
    pytest.mark.pipeline,
    pytest.mark.stack,
    pytest.mark.timeout(600),
]

CONFIG = "configs/vlm_shapes_tiny_cpu.yaml"
SMALL = [
    "data.prompt_dataset=configs/tasks/shapes.py:prompts?count=6&size=28",
    "eval.dataset=configs/tasks/shapes.py:prompts?count=3&size=28&split=test",
    "train.max_iterations=2",
    "rollout.batch_size=3",
    "rollout.n_samples_per_prompt=2",
    "run.cpu_threads=1",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
async def store(prefect_api, ray_cluster, root):
    await train(CONFIG, [*SMALL, f"storage.root={root}"], "seen")
    return RunStore("seen", root)


def rows(store, stage, iteration=0):
    read = store.read_trajectories if stage is Stage.ROLLOUT else store.read_experience
    return read(store.stage(iteration, stage)[0].parts)


async def test_every_row_shows_an_image_that_the_run_keeps(store):
    for stage in (Stage.ROLLOUT, Stage.EXPERIENCE):
        for row in rows(store, stage):
            [image] = row.images
            assert from_png(store.get_image(image.uri), image.sha256, image.uri).size == (28, 28)
            assert 0 < image.start < image.end < len(row.token_ids)


async def test_samples_of_a_group_share_one_image(store):
    shown = {(row.group_id, row.images[0].uri) for row in rows(store, Stage.ROLLOUT)}

    assert len(shown) == 3
    assert len(store.objects.list("images")) == 6 + 3  # of both iterations, and of the evaluation


async def test_engine_and_trainer_agree_on_what_was_seen(store):
    assert store.stage(1, Stage.UPDATE)[0].body["metrics"]["mismatch/logprob_abs_max"] < 1e-4


async def test_the_whole_run_verifies_and_says_what_it_saw_with(store):
    assert verify(store).ok
    assert store.read_run()["vision"]["family"] == "idefics3"


async def test_a_replay_trains_on_the_same_images(store, root):
    await replay(store.url, run_id="seen-again")

    again = RunStore("seen-again", root)
    assert verify(again).ok
    assert [row.images for row in rows(again, Stage.EXPERIENCE)] == [
        row.images for row in rows(store, Stage.EXPERIENCE)
    ]
    assert again.read_run()["vision"] == store.read_run()["vision"]
