"""What a stage leaves for the next one."""

import json

import pytest
from task_samples import complete, open_run

from rlhf_core.errors import LeaseError, StorageError
from rlhf_core.records import PromptCursor, Stage, StageManifest
from tasks.advantage import kl_coef_of
from tasks.rollout import cursor_before
from tasks.stages import commit, finished, required, small
from tasks.update import next_kl_coef


async def test_a_stage_is_finished_once_it_is_committed(tmp_path):
    run = open_run(tmp_path)
    before = await finished(run, 3, Stage.REWARD)

    ref = await commit(run, 3, Stage.REWARD, [], [], {"failures": {}})
    manifest, found = await required(run, 3, Stage.REWARD)

    assert before is None
    assert found == ref
    assert (manifest.policy_version, manifest.body) == (3, {"failures": {}})


async def test_a_manifest_names_what_it_was_made_from(tmp_path):
    run = open_run(tmp_path)
    rollout = await commit(run, 0, Stage.ROLLOUT, [], [], {})

    await commit(run, 0, Stage.REWARD, [], [rollout], {})
    manifest, _ = await required(run, 0, Stage.REWARD)

    assert manifest.inputs == {"rollout": rollout.sha256}


async def test_the_first_commit_counts(tmp_path):
    run = open_run(tmp_path)
    first = await commit(run, 0, Stage.REWARD, [], [], {"n": 1})

    second = await commit(run, 0, Stage.REWARD, [], [], {"n": 2})

    assert second == first
    assert (await required(run, 0, Stage.REWARD))[0].body == {"n": 1}


async def test_a_stage_that_must_be_done_and_is_not(tmp_path):
    with pytest.raises(StorageError, match=r"/run: stage reward of iteration 3 has no manifest; run it first"):
        await required(open_run(tmp_path), 3, Stage.REWARD)


async def test_a_reference_is_small_json(tmp_path):
    ref = await commit(open_run(tmp_path), 3, Stage.REWARD, [], [], {})

    shown = json.loads(json.dumps(small(ref)))

    assert shown == {
        "stage": "reward",
        "iteration": 3,
        "manifest": "iterations/00000003/reward.json",
        "sha256": ref.sha256,
        "rows": 0,
    }


async def test_a_draw_begins_where_the_one_before_ended(tmp_path):
    run = open_run(tmp_path)
    complete(run, 0)

    assert await cursor_before(run, 0) == PromptCursor(0, 0)
    assert await cursor_before(run, 1) == PromptCursor(0, 8)


async def test_the_kl_coefficient_follows_the_update_before(tmp_path):
    run = open_run(tmp_path, "algo.kl.init_coef=0.05")
    complete(run, 0)
    complete(run, 1)

    assert [await kl_coef_of(run, k) for k in range(3)] == [0.05, 0.1, 1.1]


def assembled(rows=256, **metrics):
    return StageManifest("run", 0, Stage.EXPERIENCE, (), rows, 0, 0, body={"metrics": metrics})


@pytest.mark.golden
@pytest.mark.parametrize(
    ("overrides", "experience", "update", "coefficient"),
    [
        (["algo.kl.target=6"], {"kl/mean": 12.0}, {}, 0.100512),
        (["algo.kl.target=6"], {"kl/mean": 12.0}, {"update/kl": 3.0}, 0.099488),  # as measured while training
        (["algo.kl.target=6"], {}, {}, 0.1),
        ([], {"kl/mean": 12.0}, {"update/kl": 12.0}, 0.1),  # a fixed coefficient
    ],
)
def test_the_next_kl_coefficient(tmp_path, overrides, experience, update, coefficient):
    """ALGORITHMS section 8: b=.1, 256 samples, horizon 10000."""
    run = open_run(tmp_path, "algo.kl.init_coef=0.1", *overrides)

    found = next_kl_coef(run, assembled(**experience), 0.1, update)

    assert found == pytest.approx(coefficient, abs=1e-9)


async def test_a_process_that_lost_its_lease_commits_nothing(tmp_path):
    run = open_run(tmp_path)
    run.session.lost = True

    with pytest.raises(LeaseError, match="is lost"):
        await commit(run, 0, Stage.REWARD, [], [], {})

    assert await finished(run, 0, Stage.REWARD) is None
