"""Groups that outlive an iteration: begun in one and finished in another, or kept and too old when they would be trained.

A kept group has the rewards 0 and 1, a rejected one 1 and 1. Of ``carrying_rig``: ``pace`` and ``holds`` say how long answers
take. Slow is here an answer that goes on until the engine speaks with version 3.
"""

import asyncio
import contextlib
import math
import random
from collections import Counter

import pytest
from carrying_rig import OverlappingRig
from filling_rig import MIXED, Killed, Rig, always, by_place, place
from replay_rig import ReplayRig, record

from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import Stage
from rlhf_core.storage import trajectories
from tasks.due import iterations_to_do

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

SOLVED = (1.0, 1.0)
RLOO = "algo.advantage.estimator=rloo"
FILTER = "algo.dynamic_filtering_enable=true"


def carrying(batch, in_flight, queue=2):
    return (
        "rollout.n_samples_per_prompt=2",
        "rollout.publish_groups=3",
        "train.async_enable=true",
        "train.partial_rollout_enable=true",
        f"train.async_queue_size={queue}",
        f"rollout.batch_size={batch}",
        f"rollout.vllm_generate_batch_size={in_flight}",
    )


@pytest.fixture
def rig(monkeypatch):
    def make(prompts, script, *overrides, **options):
        return OverlappingRig(monkeypatch, prompts, script, *overrides, **options)

    return make


def slow(*places):
    return lambda where, iteration, version: where[1] in places and version < 3


def total(**counts):
    return {"drawn": 0, "carried": 0, "trained": 0, "filtered": 0, "failed": 0, "buffered": 0} | counts


def metric(rig, name):
    return [rig.body(k)["metrics"].get(name, 0) for k in rig.store.completed_iterations()]


def trained(rig):
    """Places of all groups that were trained, [(epoch, place)], in the order of iterations."""
    return [where for k in rig.store.completed_iterations() for where in rig.trained(k)]


def check_laws(rig, prompts):
    """What holds of every run that came to its end."""
    done = rig.store.completed_iterations()
    counts = rig.total
    assert counts["drawn"] == prompts == counts["trained"] + counts["filtered"] + counts["failed"]
    assert len(trained(rig)) == len(set(trained(rig))) == counts["trained"]
    for k in done:
        assert len({epoch for epoch, _ in rig.trained(k)}) <= 1, "batches do not cross epochs"
        assert max(rig.ages(k), default=0) <= rig.config.max_age
        played, scored = (rig.store.stage(k, stage)[0] for stage in (Stage.ROLLOUT, Stage.REWARD))
        batch = played.selected
        rows = [row.key for row in rig.store.read_trajectories(played.parts) if row.group_id in batch]
        rewards = [(row.group_id, row.sample_index) for row in rig.store.read_rewards(scored.parts)]
        rewards = [key for key in rewards if key[0] in batch]
        assert len(rows) == len(set(rows)) == len(rewards) == len(set(rewards)), "no reader finds a sample twice"


# --- gone on with


async def test_an_iteration_closes_when_its_batch_is_full_and_the_rest_goes_on(rig):
    """8 prompts, batch 2, 4 in flight; p1 is slow: begun by iteration 0, it is trained by the last."""
    rig = rig(8, always(MIXED), *carrying(2, 4, queue=4), holds=slow(1))
    run = rig.start()

    await rig.train(run)

    check_laws(rig, 8)
    assert 1 in rig.batches[-1]
    player = run.session.player
    assert player.begun.count((0, 1)) == 2, "two samples, neither begun anew"
    assert sum(metric(rig, "rollout/continued_groups")) >= 1
    assert metric(rig, "rollout/unfinished_groups")[-1] == 0
    assert sum(metric(rig, "rollout/tokens")) == player.spoken, "each token counts once"


async def test_what_is_in_flight_waits_as_buffered(rig):
    rig = rig(8, always(MIXED), *carrying(2, 4, queue=4), holds=slow(1))

    await rig.train(rig.start())

    first = rig.body(0, Stage.EXPERIENCE)["ledger"]
    assert (first["drawn"], first["trained"], first["buffered"]) == (4, 2, 2)
    assert [group["group_id"] for group in rig.body(0)["unfinished"]].count("0000-00000001") == 1


async def test_versions_of_a_continued_group_are_those_that_spoke(rig):
    rig = rig(8, always(MIXED), *carrying(2, 4, queue=4), holds=slow(1))

    await rig.train(rig.start())

    last = rig.store.completed_iterations()[-1]
    rows = rig.store.read_trajectories(rig.store.stage(last, Stage.ROLLOUT)[0].parts)
    versions = {span.version for row in rows if place(row.group_id) == (0, 1) for span in row.version_spans}
    assert len(versions) > 1
    group = next(group for group in rig.body(last)["selected"] if place(group["group_id"]) == (0, 1))
    assert group["oldest_version"] == min(versions) < last
    assert {(row.iteration, row.round) for row in rows if place(row.group_id) == (0, 1)} == {
        (group["iteration"], group["round"])
    }


async def test_the_next_draw_fills_up_what_is_in_flight(rig):
    rig = rig(12, always(MIXED), *carrying(2, 6, queue=4), pace=lambda where: 2 + where[1] % 3)
    run = rig.start()

    await rig.train(run)

    check_laws(rig, 12)
    for draw in run.session.draws[:3]:
        assert draw.prompts + len(draw.unfinished) + len(draw.again) == 6
        assert draw.wanted <= 2


async def test_rejected_groups_are_replaced_without_waiting_for_the_slow_ones(rig):
    """p0 is rejected and p1 slow: iteration 0 takes p2 and p3."""
    script = by_place({0: SOLVED}, MIXED)
    rig = rig(8, script, *carrying(2, 4, queue=6), FILTER, holds=slow(1))

    await rig.train(rig.start())

    check_laws(rig, 8)
    assert 1 in rig.batches[-1]
    assert rig.total == total(drawn=8, trained=7, filtered=1)


async def test_case_1_the_last_batch_is_what_is_left(rig):
    """7 prompts, batch 2, 4 in flight: steps of 2, 2, 2, 1."""
    rig = rig(7, always(MIXED), *carrying(2, 4), pace=lambda where: 1 + where[1] % 3)
    run = rig.start()

    await rig.train(run)

    check_laws(rig, 7)
    assert [len(batch) for batch in rig.batches] == [2, 2, 2, 1]
    assert iterations_to_do(run) == []


async def test_case_20_the_data_ends_before_the_batch_is_full(rig):
    """6 prompts, batch 4; p0, p1 and p4 have a mean of .5."""
    rig = rig(6, by_place({0: MIXED, 1: MIXED, 4: MIXED}, SOLVED), *carrying(4, 5), FILTER)

    await rig.train(rig.start())

    assert rig.batches == [[0, 1, 4]]
    assert rig.total == total(drawn=6, trained=3, filtered=3)


async def test_case_104_nothing_to_train_stops_with_the_counts(rig):
    """However many rounds it takes: as many groups as three full ones have."""
    limit = "algo.dynamic_filtering_max_rounds=3"
    rig = rig(40, always((0.0, 0.0)), *carrying(2, 4), FILTER, limit, pace=lambda where: 1 + where[1] % 3)

    with pytest.raises(RunFailedError, match=r"0 of 2 groups after \d+ rounds .*: 1[2-6] groups generated, 0 kept"):
        await rig.train(rig.start())


async def test_at_the_end_of_an_epoch_what_is_in_flight_is_finished_before_the_next_begins(rig):
    """5 prompts, 2 epochs, batch 2, 4 in flight; p0 goes on until two updates of its epoch are done."""

    def held(where, iteration, version):
        return where[1] == 0 and version < 3 * where[0] + 2

    rig = rig(5, always(MIXED), *carrying(2, 4, queue=6), "train.num_episodes=2", holds=held)

    await rig.train(rig.start())

    check_laws(rig, 10)
    batches = [rig.trained(k) for k in rig.store.completed_iterations()]
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1]
    assert [(0, 0) in batches[2], (1, 0) in batches[5]] == [True, True]


async def test_a_limit_of_iterations_leaves_groups_in_flight_and_the_account_says_so(rig):
    rig = rig(8, always(MIXED), *carrying(2, 4), "train.max_iterations=1", pace=lambda where: 1 + 20 * where[1])

    await rig.train(rig.start())

    assert rig.total == total(drawn=4, trained=2, buffered=2)


# --- too old


async def test_what_got_too_old_in_flight_is_begun_anew_and_awaited(rig):
    """Queue 1. As iteration 0 begins it, p1 never ends."""
    rig = rig(12, always(MIXED), *carrying(2, 4, queue=1), holds=lambda w, iteration, _: (w[1], iteration) == (1, 0))
    run = rig.start()

    await rig.train(run)

    check_laws(rig, 12)
    player = run.session.player
    assert player.begun.count((0, 1)) == 4
    assert player.ended_early.count((0, 1)) == 2
    [draw] = [draw for draw in run.session.draws if "0000-00000001" in draw.again]
    assert 1 in rig.batches[draw.iteration]
    assert metric(rig, "staleness/requeued_groups")[draw.iteration] >= 1


async def test_case_32_a_producer_ten_times_as_fast_as_the_trainer(rig):
    """Limit 2: no trained token is older; what got too old is sampled again, and counted."""
    rig = rig(30, always(MIXED), *carrying(2, 8), pace=lambda where: 1 + where[1] * 7 % 5, update_ticks=30)

    await rig.train(rig.start())

    check_laws(rig, 30)
    assert max(age for k in rig.store.completed_iterations() for age in rig.ages(k)) == 2
    assert sum(metric(rig, "staleness/requeued_groups")) > 0


async def test_surplus_that_got_too_old_is_sampled_again_in_place_of_new_prompts(monkeypatch):
    """Sync, 8 prompts, batch 2, generated 4 at a time, and no token may be of an older version."""
    rig = Rig(
        monkeypatch,
        8,
        always(MIXED),
        *("rollout.n_samples_per_prompt=2", "rollout.batch_size=2", "rollout.vllm_generate_batch_size=4"),
        "rollout.max_age=0",
    )
    run = rig.start()

    await rig.train(run)

    assert rig.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [(draw.prompts, len(draw.again)) for draw in run.session.draws] == [(4, 0), (2, 2), (2, 2), (0, 2)]
    assert rig.total == total(drawn=8, trained=8)
    assert metric(rig, "staleness/requeued_groups") == [0, 2, 2, 2]
    assert [rig.body(k, Stage.EXPERIENCE)["metrics"]["rollout/staleness_max"] for k in range(4)] == [0, 0, 0, 0]


async def test_surplus_that_is_sampled_again_may_be_rejected_then(monkeypatch):
    """p2 is mixed when it is first sampled, and solved the second time."""
    seen = Counter()

    def script(where):
        seen[where] += 1
        return SOLVED if where[1] == 2 and seen[where] > 4 else MIXED  # asked by two samples, and for their two rewards

    overrides = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2", "rollout.vllm_generate_batch_size=4")
    rig = Rig(monkeypatch, 6, script, *overrides, FILTER, "rollout.max_age=0")

    await rig.train(rig.start())

    assert rig.batches == [[0, 1], [3, 4], [5]]
    assert rig.total == total(drawn=6, trained=5, filtered=1)


async def test_a_batch_with_old_and_new_samples_has_the_rewards_of_the_new_ones(monkeypatch):
    """p6 and p7 are left over by iteration 2. In iteration 3 only p7 is too old: p6 keeps its samples."""
    sampled_again = []

    def script(where):
        return (0.25, 0.5) if where[1] == 7 and sampled_again else MIXED

    overrides = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2", "rollout.vllm_generate_batch_size=4")
    rig = Rig(monkeypatch, 8, script, *overrides, "rollout.max_age=1")
    run = rig.start()
    honest = run.session.rollout
    run.session.player.version_of = lambda e: 1 if (e.group_id, e.iteration) == ("0000-00000007", 2) else e.iteration

    async def rollout(draw):
        sampled_again.extend(draw.again)
        return await honest(draw)

    run.session.rollout = rollout
    await rig.train(run)

    assert (rig.batches, sampled_again) == ([[0, 1], [2, 3], [4, 5], [6, 7]], ["0000-00000007"])
    found = [(place(row.group_id)[1], row.result.reward) for row in rewards_of(rig, 3)]
    assert sorted(found) == [(6, 0.0), (6, 1.0), (7, 0.25), (7, 0.5)]
    assert sorted(row["reward"] for row in trajectories(rig.store, 3).to_pylist()) == [0.0, 0.25, 0.5, 1.0]
    assert rig.body(3, Stage.REWARD)["metrics"]["reward/mean"] == 1.75 / 4


def rewards_of(rig, iteration):
    return rig.store.read_rewards(rig.store.stage(iteration, Stage.REWARD)[0].parts)


# --- killed


async def test_case_6_killed_at_half_with_ten_in_flight_no_prompt_is_lost(rig):
    """100 prompts, batch 10, 20 in flight; the answer of prompt i has i + 1 tokens, so the long ones are in flight."""
    rig = rig(100, always(MIXED), *carrying(10, 20, queue=3), pace=lambda where: 1 + where[1])
    first = rig.start(crash=("update", 5))
    with pytest.raises(Killed):
        await rig.train(first)
    newest = max(k for k in rig.store.iterations() if rig.store.stage(k, Stage.ROLLOUT))
    # 20 in flight, less those that the batch waited for: what an earlier one had too many of, it did not wait for.
    assert 0 < len(rig.body(newest)["unfinished"]) < 20

    await rig.train(rig.start())

    check_laws(rig, 100)
    assert sorted(where for _, where in trained(rig)) == list(range(100))
    rows = [row for k in rig.store.completed_iterations() for row in experience(rig, k)]
    assert sum(row.num_actions for row in rows) / len(rows) - 1 == 49.5


def experience(rig, iteration):
    return rig.store.read_experience(rig.store.stage(iteration, Stage.EXPERIENCE)[0].parts)


async def test_finished_groups_of_a_round_that_was_cut_off_are_not_sampled_again(rig):
    """An engine dies while p3 speaks; p0, p1 and p2 are durable by then, whatever iteration they are for."""
    options = {"pace": lambda where: 40 if where[1] == 3 else 2}
    rig = rig(4, always(MIXED), *carrying(4, 5), "rollout.publish_groups=1", **options)
    with pytest.raises(WorkerError):
        await rig.train(rig.start(script=by_place({3: (None, None)}, MIXED)))

    second = rig.start()
    await rig.train(second)

    assert set(second.session.player.sampled) == {(0, 3)}
    assert rig.body(0)["resumed_groups"] == 3
    check_laws(rig, 4)


async def test_groups_whose_engine_died_while_nobody_waited_are_begun_anew(rig):
    """p1 is in flight when iteration 0 has closed; its engine drops it before iteration 1 asks."""
    answers = {1: (None, None)}
    rig = rig(8, lambda w: answers.get(w[1], MIXED), *carrying(2, 4, queue=4), pace=lambda w: 9 if w[1] == 1 else 2)
    run = rig.start()
    honest = run.session.rollout

    async def rollout(draw):
        if draw.iteration == 1:
            await asyncio.sleep(0.1)
            answers.clear()
        return await honest(draw)

    run.session.rollout = rollout
    await rig.train(run)

    check_laws(rig, 8)
    assert run.session.player.begun.count((0, 1)) == 4


# --- replays


async def replayed(monkeypatch, source, *changes):
    rig = ReplayRig(monkeypatch, record(source), *changes)
    await rig.train(rig.start())
    return rig


async def test_a_replay_trains_each_group_with_the_iteration_that_its_source_did(rig, monkeypatch):
    source = rig(12, always(MIXED), *carrying(2, 5), pace=lambda where: 1 + where[1] % 4 * 9)
    await source.train(source.start())

    again = await replayed(monkeypatch, source, RLOO)

    assert again.batches == source.batches
    assert again.total == source.total


async def test_groups_that_were_in_flight_where_a_replay_begins_are_as_if_drawn_now(rig, monkeypatch):
    source = rig(8, always(MIXED), *carrying(2, 4, queue=4), holds=slow(1))
    await source.train(source.start())

    again = ReplayRig(monkeypatch, record(source), RLOO, iterations=(1, 3))
    await again.train(again.start())

    assert again.batches == source.batches[1:]
    assert again.total["drawn"] == again.total["trained"] == 6


async def test_a_filter_over_continued_groups_trains_each_at_most_once(rig, monkeypatch):
    """p2 and p5 are solved, and the source did not mind."""
    script = by_place({2: SOLVED, 5: SOLVED}, MIXED)
    source = rig(12, script, *carrying(2, 5), pace=lambda where: 1 + where[1] % 4 * 9)
    await source.train(source.start())

    again = await replayed(monkeypatch, source, FILTER)

    assert len(trained(again)) == len(set(trained(again))) == again.total["trained"] <= 10
    assert {(0, 2), (0, 5)}.isdisjoint(trained(again))


async def test_a_group_that_was_sampled_again_counts_once_where_groups_are_judged_anew(monkeypatch):
    """The source, of which no token may be old, samples p2 and p3 twice, p4 and p5 too, and p6 and p7."""
    overrides = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2", "rollout.vllm_generate_batch_size=4")
    source = Rig(monkeypatch, 8, always(MIXED), *overrides, "rollout.max_age=0")
    await source.train(source.start())

    again = await replayed(monkeypatch, source, FILTER)

    assert again.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert again.total == total(drawn=8, trained=8)


# --- the laws, whatever happens


class Chance:
    """A run drawn from a seed: sizes, rewards, lengths of answers, how long updates take, and where it is killed."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.prompts, self.episodes = chance.randint(1, 14), chance.randint(1, 2)
        self.batch = chance.randint(1, 4)
        self.in_flight, self.queue = self.batch + chance.randint(1, 6), chance.randint(1, 3)
        self.filter = (FILTER, "algo.dynamic_filtering_max_rounds=100") if chance.random() < 0.6 else ()
        self.update_ticks = chance.choice([0, 3, 12])
        self.paces = [chance.choice([1, 1, 2, 3, 8, 20]) for _ in range(self.prompts)]
        kinds = [MIXED, MIXED, SOLVED, (0.0, 0.0), ("no", "no")]
        self.outcomes = [MIXED] + [
            chance.choice(kinds) for _ in range(1, self.prompts)
        ]  # without any it would be stopped
        acts = [(chance.choice(["rollout", "score", "update"]), chance.randint(0, 2)) for _ in range(3)]
        self.crashes = acts[: chance.randint(0, 3)]

    def rig(self, make):
        return make(
            self.prompts,
            lambda where: self.outcomes[where[1]],
            *carrying(self.batch, self.in_flight, self.queue),
            *self.filter,
            f"train.num_episodes={self.episodes}",
            pace=lambda where: self.paces[where[1]],
            update_ticks=self.update_ticks,
        )


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_no_prompt_is_lost_none_trained_twice_and_no_token_is_too_old(rig, seed):
    chance = Chance(seed)
    rig = chance.rig(rig)

    for crash in chance.crashes:
        with contextlib.suppress(Killed):
            await rig.train(rig.start(crash=crash))
    await rig.train(rig.start())

    check_laws(rig, chance.prompts * chance.episodes)
    assert iterations_to_do(rig.start()) == []
    assert len(rig.store.completed_iterations()) <= chance.episodes * math.ceil(chance.prompts / chance.batch)
