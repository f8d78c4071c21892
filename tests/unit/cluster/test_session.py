"""The processes of a run: which are started, asked and made again. They follow a script; the log is real."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from minimal_config import config
from scripted_actors import digest
from session_rig import Run

from rlhf_core.cluster import rank_group
from rlhf_core.cluster.session import PlannedSteps
from rlhf_core.errors import ClusterLostError, LeaseError, WorkerError


@pytest.fixture
async def run():
    made = await Run(updates=2).at(2)
    yield made
    await made.session.close(keep_actors=True)


# --- opening and closing


async def test_every_actor_is_made_and_started():
    run = await Run().open()

    assert sorted(run.groups.made) == sorted(run.groups.names)
    assert [run[name].held for name in ("engine-0", "engine-1", "policy-0", "critic-0")] == [0, 0, 0, 0]
    assert (run["policy-0"].starts[0][1:], run["critic-0"].starts[0][1:]) == ((10,), (12,))
    await run.session.close(keep_actors=True)


async def test_the_scoring_worker_is_told_of_the_reward_model():
    """Of the ranks, and of the longest text that each of them reads."""
    run = await Run().open()
    without = await Run(reward=0, reference=0, critic=0).open()

    assert run["scoring"].starts == [([run["reward-0"], run["reward-1"]], 64)]
    assert without["scoring"].starts == [([], None)]
    for opened in (run, without):
        await opened.session.close(keep_actors=True)


async def test_what_an_earlier_attempt_left_is_found_but_for_those_that_read_files_of_the_user():
    run = await Run(updates=2).at(2)
    before = dict(run.groups.alive)

    await run.open()

    anew = {name for name, actor in before.items() if run[name] is not actor}
    assert anew == {"rollout", "scoring", "reference-0"}
    await run.session.close(keep_actors=True)


async def test_ranks_that_loaded_a_loss_of_the_users_are_made_anew_too():
    run = await Run(updates=2).at(2)
    run.session.config = config("actor.policy_loss_type=mine.py:loss")
    before = dict(run.groups.alive)

    await run.open()

    assert run["policy-0"] is not before["policy-0"]
    assert run["critic-0"] is before["critic-0"]
    await run.session.close(keep_actors=True)


@pytest.mark.parametrize("keep", [True, False])
async def test_closing_gives_the_lease_back_and_keeps_or_ends_the_actors(keep):
    run = await Run().open()
    run.groups.killed.clear()

    await run.session.close(keep_actors=keep)

    assert run.lease.released
    assert sorted(run.groups.killed) == ([] if keep else sorted([*run.groups.names, "keeper"]))
    tidied = {(role, index) for role, index, _ in run.asked("shutdown")}
    assert tidied == (set() if keep else {("engine", 0), ("engine", 1), ("rollout", 0), ("scoring", 0), ("policy", 0)})


async def test_the_lease_is_given_back_though_the_cluster_is_gone(monkeypatch):
    """Else a retry in the same process would find the run held, and renewed, for ever."""
    run = await Run().open()

    def gone(names):
        raise ClusterLostError("the Ray cluster of this run is gone")

    monkeypatch.setattr(run.groups, "kill", gone)

    with pytest.raises(ClusterLostError):
        await run.session.close(keep_actors=False)

    assert run.lease.released


async def test_a_replay_needs_neither_engines_nor_a_rollout_worker():
    run = Run(updates=2, engine=0, rollout=0)
    told = []

    async def plan_steps(facts):
        told.append(facts)
        return PlannedSteps(policy=10, critic=12)

    await run.session.open(plan_steps)
    await run.ready(2)

    assert told == [None]
    assert not {"rollout", "engine-0"} & set(run.groups.made)
    assert run["policy-0"].held == 2
    assert run.asked("sync") == []
    await run.session.close(keep_actors=False)


# --- making good what died


async def test_where_everybody_is_ready_nothing_is_done(run) -> None:
    await run.ready(2)

    assert run.groups.made == []
    assert run.asked("start", "update", "sync", "restore") == []


@pytest.mark.parametrize(
    ("dead", "again", "updated", "synced"),
    [
        (["critic-0"], ["critic-0"], ["critic"], False),
        (["policy-0"], ["policy-0"], ["policy"], False),
        (["engine-1"], ["engine-1"], [], True),
        (["reference-0"], ["reference-0"], [], False),
        (["rollout"], ["rollout"], [], False),
        (["scoring"], ["scoring"], [], False),
        (["reward-1"], ["reward-0", "reward-1", "scoring"], [], False),  # the scoring worker knows the old ones
        (["critic-0", "engine-0", "scoring"], ["critic-0", "engine-0", "scoring"], ["critic"], True),
    ],
)
async def test_who_is_dead_is_made_again_and_nobody_else(run, dead, again, updated, synced) -> None:
    for name in dead:
        run[name].dead = True

    await run.ready(2)

    assert sorted(run.groups.made) == again
    assert [role for role, _, _ in run.asked("update")] == [role for role in updated for _ in range(2)]
    assert bool(run.asked("sync")) is synced
    assert {run[name].held for name in ("engine-0", "engine-1", "policy-0", "critic-0")} == {2}
    assert run["scoring"].starts[-1][0] == [run["reward-0"], run["reward-1"]]


async def test_an_engine_that_lags_behind_gets_the_weights(run) -> None:
    run["engine-0"].held = 1

    await run.ready(2)

    assert (run.groups.made, run.asked("sync")) == ([], [("policy", 0, "sync")])
    assert run["engine-0"].held == 2


async def test_a_sync_that_leaves_an_engine_behind_is_its_death(run, monkeypatch) -> None:
    monkeypatch.setattr(type(run["policy-0"]), "do_sync", lambda *arguments: None)
    run["engine-0"].held = 1

    with pytest.raises(WorkerError, match=r"the engines hold versions \[1, 2\], not 2"):
        await run.ready(2)


async def test_a_stage_whose_critic_dies_is_run_again(run) -> None:
    """The policy has taken the update that was not recorded: it goes back too."""
    run["critic-0"].dies_in = "update"

    updated = await run.session.heal(2, lambda: run.session.update(2, None, 0.1))

    assert sorted(run.groups.made) == ["critic-0", "policy-0"]
    assert updated.digests == {"digest": digest("policy", [0, 1, 2]), "critic_digest": digest("critic", [0, 1, 2])}


# --- stages


def of_stage(stage, failed):
    """What the worker of a stage says, and how it is asked."""
    if stage == "rollout":
        said = SimpleNamespace(tally=SimpleNamespace(failed=failed))
        return said, lambda session: session.rollout(SimpleNamespace(iteration=2))
    if stage == "evaluation":
        return ({"eval/failed": float(failed)}, [], []), lambda session: session.judge(2, ())
    said = SimpleNamespace(failures={"its process was killed by SIGKILL": failed} if failed else {})
    return said, lambda session: session.score(2, [], {})


@pytest.mark.parametrize("stage", ["rollout", "scoring"])
async def test_failed_samples_are_believed_only_while_the_cluster_lives(run, monkeypatch, stage) -> None:
    """A node that goes down kills the processes of rewards and environments first."""
    run[stage].said, ask = of_stage(stage, failed=1)
    assert await ask(run.session) is run[stage].said

    def gone():
        raise ClusterLostError("the cluster is gone")

    monkeypatch.setattr(run.groups, "check_cluster", gone)
    with pytest.raises(ClusterLostError):
        await ask(run.session)

    run[stage].said, ask = of_stage(stage, failed=0)
    assert await ask(run.session) is run[stage].said  # nobody failed: nothing to doubt


async def test_the_failures_of_an_evaluation_are_doubted_too(run, monkeypatch) -> None:
    run["scoring"].said, ask = of_stage("evaluation", failed=1)
    assert (await ask(run.session))[0]["eval/failed"] == 1

    monkeypatch.setattr(run.groups, "check_cluster", lambda: setattr(run["scoring"], "dead", True))
    with pytest.raises(WorkerError, match="evaluation of version 2: samples failed in a process that has died since"):
        await ask(run.session)


async def test_the_failures_of_its_answers_too(run, monkeypatch) -> None:
    monkeypatch.setattr(run["rollout"], "do_evaluate", lambda *arguments: ((), {"rollout/failed": 1.0}))
    assert (await run.session.answer(2))[1] == {"rollout/failed": 1.0}

    monkeypatch.setattr(run.groups, "check_cluster", lambda: setattr(run["rollout"], "dead", True))
    with pytest.raises(
        WorkerError, match="answers of the evaluation of version 2: samples failed in a process that has died"
    ):
        await run.session.answer(2)


@pytest.mark.parametrize("stage", ["rollout", "scoring"])
async def test_what_a_worker_that_has_died_since_said_of_failures_does_not_count(run, monkeypatch, stage) -> None:
    run[stage].said, ask = of_stage(stage, failed=1)
    monkeypatch.setattr(run.groups, "check_cluster", lambda: setattr(run[stage], "dead", True))

    with pytest.raises(WorkerError, match="in a process that has died since"):
        await ask(run.session)


async def test_policy_and_critic_learn_at_once(run) -> None:
    updated = await run.session.update(2, None, 0.1)

    assert updated.metrics == {"policy/loss": 0.5, "critic/loss": 0.5}
    assert updated.digests == {"digest": digest("policy", [0, 1, 2]), "critic_digest": digest("critic", [0, 1, 2])}
    assert updated.optimizer_steps == 3


async def test_a_run_without_a_critic_says_nothing_of_one() -> None:
    run = await Run(updates=2, critic=0).at(2)

    updated = await run.session.update(2, None, 0.1)

    assert updated.digests == await run.session.digests() == {"digest": digest("policy", [0, 1, 2])}
    assert await run.session.save(3) == ["policy 3-0"]
    await run.session.close(keep_actors=True)


async def test_the_policy_is_not_asked_for_what_its_update_will_say(run) -> None:
    await run.session.assemble(2, None, None, 0.1)

    assert sorted(run.asked("logprobs", "values")) == [("critic", 0, "values"), ("reference", 0, "logprobs")]


async def test_every_model_scores_the_rows_of_several_optimizer_steps() -> None:
    run = await Run(2, "train.max_epochs=2").at(2)

    await run.session.assemble(2, None, None, 0.1)
    await run.session.close(keep_actors=True)

    assert sorted(run.asked("logprobs", "values")) == [
        ("critic", 0, "values"),
        ("policy", 0, "logprobs"),
        ("reference", 0, "logprobs"),
    ]


@pytest.mark.parametrize(("dies", "error"), [(True, WorkerError), (False, RuntimeError)])
async def test_a_rank_that_dies_while_rows_are_scored_is_a_death_whoever_complains(dies, error) -> None:
    """A collective of ZeRO-3: the peer that lives speaks first."""
    run = await Run(updates=2, critic=2).at(2)
    run["critic-0"].fails["values"], run["critic-1"].dead = RuntimeError("connection closed by peer"), dies

    with pytest.raises(error, match="connection closed by peer"):
        await run.session.assemble(2, None, None, 0.1)
    await run.session.close(keep_actors=True)


def busy(ranks, monkeypatch):
    """They answer nobody for a while, longer than a ping may take: a rank takes one call after the other."""
    monkeypatch.setattr(rank_group, "PING_SECONDS", 0.05)
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, done.set)
    for rank in ranks:
        for method in ("do_ping", "do_version"):

            async def call(answer=getattr(rank, method)):  # noqa: B008  each its own
                await done.wait()
                return answer()

            monkeypatch.setattr(rank, method, call, raising=False)


async def test_ranks_that_are_busy_for_a_worker_that_died_are_not_taken_for_dead(run, monkeypatch) -> None:
    """Else they would be made again, and every update since the newest checkpoint with them."""
    run["scoring"].dies_in = "assemble"

    async def assemble():
        busy([run["policy-0"], run["critic-0"], run["reference-0"]], monkeypatch)
        await run.session.assemble(2, None, None, 0.1)

    await run.session.heal(2, assemble)

    assert run.groups.made == ["scoring"]


async def test_a_policy_that_is_still_saving_when_the_critic_dies_is_not_taken_for_dead(run, monkeypatch) -> None:
    run["critic-0"].dies_in = "save"

    async def save():
        busy([run["policy-0"]], monkeypatch)
        return await run.session.save(2)

    await run.session.heal(2, save)

    assert run.groups.made == ["critic-0"]


async def test_both_models_are_in_a_checkpoint(run) -> None:
    assert await run.session.save(2) == ["policy 2-0", "critic 2-0"]
    assert await run.session.digests() == {
        "digest": digest("policy", [0, 1]),
        "critic_digest": digest("critic", [0, 1]),
    }


async def test_a_process_whose_lease_has_expired_does_nothing_more(run) -> None:
    run.lease.expires_at = time.time() - 1

    with pytest.raises(LeaseError, match="the lease of run run has expired"):
        await run.session.update(2, None, 0.1)
    assert run.asked("update") == []
