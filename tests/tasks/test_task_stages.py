"""What a stage leaves for the next one."""

import asyncio
import json
import threading

import pytest
from task_samples import complete, open_run

from rlhf_core.cluster.session import Updated
from rlhf_core.errors import LeaseError, StorageError
from rlhf_core.records import PromptCursor, Stage, StageManifest
from tasks import run as open_runs
from tasks.advantage import kl_coef_of
from tasks.rollout import cursor_before
from tasks.stages import commit, finished, required, small, to_the_end
from tasks.update import next_kl_coef, update


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


async def test_who_is_cancelled_leaves_no_thread_behind_that_writes(tmp_path, monkeypatch):
    """The run is given back then: the next attempt would work beside it."""
    run, writing, may_write = open_run(tmp_path), threading.Event(), threading.Event()
    write = type(run.store).commit

    def slowly(store, manifest):
        writing.set()
        assert may_write.wait(10)
        return write(store, manifest)

    monkeypatch.setattr(type(run.store), "commit", slowly)
    committing = asyncio.create_task(commit(run, 0, Stage.REWARD, [], [], {}))
    await asyncio.to_thread(writing.wait)

    committing.cancel()
    await asyncio.sleep(0.05)
    assert not committing.done()
    may_write.set()

    with pytest.raises(asyncio.CancelledError):
        await committing
    assert await finished(run, 0, Stage.REWARD) is not None


async def test_an_update_under_way_is_recorded_though_another_iteration_has_failed(tmp_path, monkeypatch):
    """Else the ranks would be ahead of the log: trained anew from the last checkpoint on."""
    run, began = open_run(tmp_path), asyncio.Event()
    complete(run, 0, stages=(Stage.ROLLOUT, Stage.REWARD, Stage.EXPERIENCE))

    async def heal(version, work):
        return await work()

    async def learn(iteration, experience, kl_coef):
        began.set()
        await asyncio.sleep(0.05)
        return Updated({}, {"digest": "d0"}, optimizer_steps=1)

    monkeypatch.setattr(run.session, "heal", heal, raising=False)
    monkeypatch.setattr(run.session, "update", learn, raising=False)
    monkeypatch.setitem(open_runs._OPEN, "run", run)
    updating = asyncio.create_task(update.fn("run", 0))
    await began.wait()

    updating.cancel()

    with pytest.raises(asyncio.CancelledError):
        await updating
    assert (await required(run, 0, Stage.UPDATE))[0].body["digest"] == "d0"


async def test_what_fails_while_its_caller_is_cancelled_changes_nothing_about_that(caplog):
    began = asyncio.Event()

    async def fails():
        began.set()
        await asyncio.sleep(0)
        raise StorageError("the store is away")

    doing = asyncio.create_task(to_the_end(fails()))
    await began.wait()
    doing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await doing
    assert "the store is away" in caplog.text
