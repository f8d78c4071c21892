"""Training on what another run sampled: which groups and rewards a replay trains, and where every prompt went.

The rewards of a mixed group are 0 and 1. A source is over-sampled (OVER), filtered (FILTER), or neither (PLAIN).
"""

import json
from dataclasses import replace

import pytest
from filling_rig import MIXED, Killed, Rig, always, by_place
from replay_rig import ReplayRig, record

from rlhf_core.cluster.replay import Replay, find_source, new_replay, scored_iterations
from rlhf_core.errors import ConfigError, CorruptShardError, RunFailedError
from rlhf_core.records import Stage
from rlhf_core.storage import ObjectStore, trajectories
from tasks.replay import far_from

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

PLAIN = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2")
OVER = (*PLAIN, "rollout.vllm_generate_batch_size=4")
FILTER = (*PLAIN, "algo.dynamic_filtering_enable=true")
SOLVED = (1.0, 1.0)
RLOO = "algo.advantage.estimator=rloo"


@pytest.fixture
def sampled(monkeypatch):
    """A run that has ended."""

    async def make(prompts, script, *overrides):
        rig = record(Rig(monkeypatch, prompts, script, *overrides))
        await rig.train(rig.start())
        return rig

    return make


@pytest.fixture
def replayed(monkeypatch):
    """A replay of it that has ended, and its session."""

    async def make(source, *changes, **options):
        rig = ReplayRig(monkeypatch, source, *changes, **options)
        run = rig.start()
        await rig.train(run)
        return rig, run.session

    return make


def rewards_of(rig, iteration):
    rows = rig.store.read_rewards(rig.store.stage(iteration, Stage.REWARD)[0].parts)
    return {(row.group_id, row.sample_index): row.result.reward for row in rows}


# --- batches as they were


@pytest.mark.parametrize("sampling", [PLAIN, OVER, FILTER])
async def test_the_batches_are_those_of_the_source_and_nothing_is_sampled_or_scored(sampled, replayed, sampling):
    source = await sampled(7, by_place({1: SOLVED, 4: SOLVED}, MIXED), *sampling)

    rig, session = await replayed(source, RLOO)

    assert rig.batches == source.batches
    assert rig.total == source.total
    assert [rewards_of(rig, k) for k in (0, 1)] == [rewards_of(source, k) for k in (0, 1)]
    assert session.draws == []
    assert session.source.scored == 0


async def test_a_replay_keeps_what_it_trains_on_when_its_source_is_gone(sampled, replayed):
    source = await sampled(4, always(MIXED), *PLAIN)
    rig, _ = await replayed(source, RLOO)

    ObjectStore(source.store.root).remove_folder(source.run_id)

    assert trajectories(rig.store).num_rows == 8
    assert rig.body(0)["source"]["manifest_sha256"] == rig.replay.manifests[0]["rollout"]


async def test_some_iterations_of_an_over_sampled_run_are_accounted_for(sampled, replayed):
    """Two groups waited for iteration 1: to the replay they are as if drawn in it."""
    source = await sampled(7, always(MIXED), *OVER)

    rig, _ = await replayed(source, RLOO, iterations=(1, 2))

    assert rig.batches == source.batches[1:3]
    assert rig.total["drawn"] == rig.total["trained"] + rig.total["buffered"] == 5
    assert rig.plan.iterations == 2


async def test_another_model_must_read_the_answers_as_they_were_said(sampled, replayed):
    source = await sampled(4, always(MIXED), *PLAIN)

    rig, session = await replayed(source, "actor.model_name_or_path=run:other@3")

    assert rig.replay.other_model
    assert session.checked == list(rig.store.stage(0, Stage.ROLLOUT)[0].parts)


def test_people_are_warned_of_a_policy_that_is_far_from_the_one_that_spoke():
    assert far_from({"mismatch/effective_share": 0.5}) is None
    assert far_from({}) is None
    assert "mismatch/effective_share is 0.027" in far_from({"mismatch/effective_share": 0.027})


# --- scored and filtered anew


async def test_another_reward_is_given_by_scoring_the_batches_again(sampled, replayed):
    source = await sampled(4, always(MIXED), *OVER)

    rig, session = await replayed(source, "reward.functions=[{use: length}]", script=always((3.0, 5.0)))

    assert rig.batches == source.batches
    assert set(rewards_of(rig, 1).values()) == {3.0, 5.0}
    assert session.source.scored == 8
    assert session.draws == []


async def test_a_filter_that_the_source_did_not_have_rejects_its_groups(sampled, replayed):
    source = await sampled(6, by_place({1: SOLVED, 2: SOLVED, 3: SOLVED}, MIXED), *PLAIN)

    rig, session = await replayed(source, "algo.dynamic_filtering_enable=true")

    assert rig.batches == [[0], [], [4, 5]]
    assert rig.total == {"drawn": 6, "carried": 0, "trained": 3, "filtered": 3, "failed": 0, "buffered": 0}
    assert session.source.scored == 0


async def test_a_filter_over_a_replay_of_an_over_sampled_run_judges_the_batches_it_had(sampled, replayed):
    source = await sampled(7, by_place({1: SOLVED}, MIXED), *OVER)
    first, _ = await replayed(source, RLOO)
    assert first.batches == [[0, 1], [2, 3], [4, 5], [6]]

    rig, _ = await replayed(record(first), "algo.dynamic_filtering_enable=true", run_id="second")

    assert rig.batches == [[0], [2, 3], [4, 5], [6]]
    assert rig.total["filtered"] == 1


async def test_without_the_sources_filter_its_rejected_groups_are_trained(sampled, replayed):
    """Iteration 0 sampled p0 to p3 in two rounds, to train p1 and p2. Its second round is not needed now."""
    source = await sampled(6, by_place({0: SOLVED}, MIXED), *FILTER)
    assert source.batches[0] == [1, 2]

    rig, _ = await replayed(source, "algo.dynamic_filtering_enable=false")

    assert rig.batches[0] == [0, 1]
    assert rig.total["filtered"] == 0


async def test_a_filter_over_other_rewards_is_asked_again(sampled, replayed):
    source = await sampled(4, by_place({0: SOLVED}, MIXED), *FILTER)

    rig, session = await replayed(source, "reward.functions=[{use: length}]", script=by_place({1: SOLVED}, (0.25, 0.5)))

    assert 0 in rig.batches[0]
    assert 1 not in rig.batches[0]
    assert session.source.scored > 0


async def test_a_filter_that_keeps_nothing_of_the_first_batch_is_refused(sampled, replayed):
    source = await sampled(4, always(SOLVED), *PLAIN)

    with pytest.raises(RunFailedError, match=r"0 of 2 groups after .*dynamic_filtering_range"):
        await replayed(source, "algo.dynamic_filtering_enable=true")


async def test_a_replay_killed_between_two_rounds_becomes_the_same_replay(sampled, replayed, monkeypatch):
    source = await sampled(8, by_place({0: SOLVED, 3: SOLVED}, MIXED), *FILTER)
    changes = ("reward.functions=[{use: length}]",)
    whole, _ = await replayed(source, *changes)
    expected = whole.batches
    ObjectStore(source.store.root).remove_folder("replay")

    rig = ReplayRig(monkeypatch, source, *changes)
    with pytest.raises(Killed):
        await rig.train(rig.start(crash=("score", 1)))
    await rig.train(rig.start())

    assert rig.batches == expected


# --- what a replay is refused


async def test_a_source_that_was_made_anew_is_not_trained_on(sampled, monkeypatch):
    source = await sampled(4, always(MIXED), *PLAIN)
    rig = ReplayRig(monkeypatch, source, RLOO)
    forged = ({**rig.replay.manifests[0], "rollout": "0" * 64}, *rig.replay.manifests[1:])
    rig.replay = replace(rig.replay, manifests=forged)

    with pytest.raises(CorruptShardError, match=r"rollout\.json is not the manifest that was there"):
        await rig.train(rig.start())


async def test_a_source_whose_manifest_is_gone_is_named(sampled, monkeypatch):
    source = await sampled(4, always(MIXED), *PLAIN)
    rig = ReplayRig(monkeypatch, source, RLOO)
    source.store.objects.delete("iterations/00000001/reward.json")

    with pytest.raises(CorruptShardError, match=r"00000001/reward\.json, which this replay trains on, is missing"):
        await rig.train(rig.start())


async def test_iterations_beyond_the_log_are_refused(sampled, monkeypatch):
    source = await sampled(4, always(MIXED), *PLAIN)

    with pytest.raises(ConfigError, match=r"iterations 1\.\.7 of .*iteration 7 has no rewards; .* up to 1"):
        ReplayRig(monkeypatch, source, RLOO, iterations=(1, 7))


async def test_a_run_without_rewards_yet_is_refused(monkeypatch):
    rig = record(Rig(monkeypatch, 4, always(MIXED), *PLAIN))

    with pytest.raises(ConfigError, match="no iteration with trajectories and rewards yet"):
        scored_iterations(rig.store, None)


async def test_only_runs_by_rewards_can_be_replayed(monkeypatch):
    rig = Rig(monkeypatch, 4, always(MIXED), *PLAIN)
    with pytest.raises(ConfigError, match="there is no run at"):
        find_source(rig.store)

    rig.store.write_run({"run_id": "run", "kind": "sft", "config": {}})

    with pytest.raises(ConfigError, match="kind 'sft'"):
        find_source(rig.store)


async def test_a_replay_of_itself_is_refused(sampled, monkeypatch):
    source = await sampled(4, always(MIXED), *PLAIN)
    rig = ReplayRig(monkeypatch, source, RLOO)

    with pytest.raises(ConfigError, match="is the replay itself"):
        new_replay(rig.config, "run")


async def test_what_is_pinned_survives_run_json(sampled, monkeypatch):
    source = await sampled(4, always(MIXED), *PLAIN)
    replay = ReplayRig(monkeypatch, source, RLOO).replay

    again = Replay.from_json(json.loads(json.dumps(replay.to_json())), source.store)

    assert replace(again, source=replay.source) == replay
    assert replay.to_json()["source_url"] == source.store.url
