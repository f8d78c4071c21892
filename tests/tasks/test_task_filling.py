"""Batches that are filled in rounds: over-sampling, dynamic filtering, crashes, and where every prompt went.

A kept group has the rewards 0 and 1, a rejected one 1 and 1.
"""

from dataclasses import replace

import pytest
from filling_rig import MIXED, Killed, Rig, always, by_place

from rlhf_core.errors import RunFailedError, WorkerError
from rlhf_core.records import PromptCursor, Stage
from rlhf_core.storage import CheckpointStore, trajectories
from tasks.due import evaluation_due, is_last, iterations_to_do

# Arrays of a shard are views of its bytes.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

PLAIN = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=2")
OVER = (*PLAIN, "rollout.vllm_generate_batch_size=4")
FILTER = ("rollout.n_samples_per_prompt=2", "rollout.batch_size=4", "algo.dynamic_filtering_enable=true")
SOLVED = (1.0, 1.0)
UNSOLVED = (0.0, 0.0)


@pytest.fixture
def rig(monkeypatch):
    def make(prompts, script, *overrides):
        return Rig(monkeypatch, prompts, script, *overrides)

    return make


def metrics(rig, iteration):
    return rig.body(iteration)["metrics"]


def total(**counts):
    return {"drawn": 0, "carried": 0, "trained": 0, "filtered": 0, "failed": 0, "buffered": 0} | counts


# --- over-sampling


async def test_case_1_every_prompt_is_trained_once_and_the_run_ends(rig):
    """7 prompts, batch 2, generated 4 at a time: steps of 2, 2, 2, 1."""
    rig = rig(7, always(MIXED), *OVER)
    run = rig.start()

    await rig.train(run)

    assert rig.batches == [[0, 1], [2, 3], [4, 5], [6]]
    assert rig.total == total(drawn=7, trained=7)
    assert [draw.round for draw in run.session.draws] == [0, 0]
    assert iterations_to_do(run) == []


async def test_what_is_left_over_is_accounted_for_in_every_iteration(rig):
    rig = rig(7, always(MIXED), *OVER)

    await rig.train(rig.start())

    ledgers = [rig.body(k, Stage.EXPERIENCE)["ledger"] for k in range(4)]
    assert ledgers == [
        total(drawn=4, trained=2, buffered=2),
        total(carried=2, trained=2),
        total(drawn=3, trained=2, buffered=1),
        total(carried=1, trained=1),
    ]


async def test_case_2_surplus_survives_a_kill(rig):
    """8 prompts, batch 2, generated 4 at a time; killed after step 1."""
    rig = rig(8, always(MIXED), *OVER)
    first = rig.start(crash=("update", 1))
    with pytest.raises(Killed):
        await rig.train(first)

    second = rig.start()
    await rig.train(second)

    assert rig.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted({where for _, where in second.session.player.sampled}) == [4, 5, 6, 7]
    assert rig.total == total(drawn=8, trained=8)


@pytest.mark.parametrize("extra", [(), ("rollout.vllm_generate_batch_size=8",)])
async def test_case_5_a_run_stopped_between_epochs_goes_on_and_a_finished_one_does_nothing(rig, extra):
    """8 prompts, batch 4, 2 epochs; stopped after step 2."""
    rig = rig(8, always(MIXED), "rollout.batch_size=4", "train.num_episodes=2", *extra)
    await rig.train(rig.start(), iterations=2)

    assert await rig.train(rig.start()) == [2, 3]
    assert rig.batches == [[(epoch, k + i) for i in range(4)] for epoch in (0, 1) for k in (0, 4)]
    assert await rig.train(rig.start()) == []


async def test_lots_smaller_than_the_batch_fill_it_in_rounds(rig):
    rig = rig(7, always(MIXED), *PLAIN, "rollout.batch_size=4", "rollout.vllm_generate_batch_size=3")

    await rig.train(rig.start())

    assert rig.batches == [[0, 1, 2, 3], [4, 5, 6]]
    assert rig.body(0)["rounds"] == 2


async def test_batches_do_not_cross_epochs(rig):
    """5 prompts, batch 2, generated 3 at a time: what the first epoch leaves over is trained before the second begins."""
    rig = rig(5, always(MIXED), *PLAIN, "rollout.vllm_generate_batch_size=3", "train.num_episodes=2")

    await rig.train(rig.start())

    assert rig.batches == [[(epoch, place) for place in batch] for epoch in (0, 1) for batch in ([0, 1], [2, 3], [4])]
    assert rig.total == total(drawn=10, trained=10)


async def test_a_run_that_ends_by_its_limit_leaves_groups_over(rig):
    rig = rig(8, always(MIXED), *OVER, "train.max_iterations=1")
    run = rig.start()

    await rig.train(run)

    assert rig.total == total(drawn=4, trained=2, buffered=2)
    assert is_last(run, 1)


async def test_rows_that_waited_say_so(rig):
    rig = rig(8, always(MIXED), *OVER)

    await rig.train(rig.start())

    staleness = [
        (found["rollout/staleness_max"], found["rollout/staleness_mean"])
        for found in (rig.body(k, Stage.EXPERIENCE)["metrics"] for k in range(4))
    ]
    assert staleness == [(0, 0), (1, 1), (0, 0), (1, 1)]


# --- filtering


async def test_case_20_the_data_ends_before_the_batch_is_full(rig):
    """6 prompts, batch 4; p0, p1 and p4 have a mean of .5."""
    rig = rig(6, by_place({0: MIXED, 1: MIXED, 4: MIXED}, SOLVED), *FILTER)
    run = rig.start()

    assert await rig.train(run) == [0]
    assert rig.batches == [[0, 1, 4]]
    assert rig.total == total(drawn=6, trained=3, filtered=3)
    assert rig.plan.iterations == 2, "the plan is an upper bound"
    assert CheckpointStore(rig.store).versions() == [1]
    assert await rig.train(rig.start()) == []


async def test_rejected_groups_are_replaced_until_the_batch_is_full(rig):
    rig = rig(20, lambda place: MIXED if place[1] % 2 else SOLVED, *FILTER)

    await rig.train(rig.start(), iterations=1)

    assert rig.batches == [[1, 3, 5, 7]]
    assert metrics(rig, 0) | {"rollout/batch_groups": 4.0, "filter/rounds": 2.0} == metrics(rig, 0)
    counts = ("generated", "kept_share", "too_high", "too_low", "no_spread", "failed", "score_mean")
    assert [metrics(rig, 0)[f"filter/{name}"] for name in counts] == [8, 0.5, 4, 0, 0, 0, 0.75]
    assert metrics(rig, 0)["rollout/samples"] == 16


async def test_replacement_draws_a_whole_round_and_keeps_what_is_too_much(rig):
    """p0 is rejected: one group is missing, four more are drawn."""
    rig = rig(12, by_place({0: SOLVED}, MIXED), *FILTER)

    await rig.train(rig.start(), iterations=2)

    assert rig.batches == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [rig.body(k, Stage.EXPERIENCE)["ledger"] for k in range(2)] == [
        total(drawn=8, trained=4, filtered=1, buffered=3),
        total(drawn=4, carried=3, trained=4, buffered=3),
    ]


async def test_case_105_fractional_rewards_without_spread_are_rejected(rig):
    rig = rig(8, by_place({0: (0.5, 0.5), 1: UNSOLVED}, MIXED), *FILTER)

    await rig.train(rig.start(), iterations=1)

    assert rig.batches == [[2, 3, 4, 5]]
    assert (metrics(rig, 0)["filter/no_spread"], metrics(rig, 0)["filter/too_low"]) == (1, 1)


async def test_case_107_all_kept_is_a_share_of_one(rig):
    rig = rig(4, always(MIXED * 4), *FILTER, "rollout.n_samples_per_prompt=8")

    await rig.train(rig.start())

    assert metrics(rig, 0)["filter/kept_share"] == 1.0


@pytest.mark.parametrize("on_limit", ["train", "stop"])
async def test_case_104_nothing_to_train_stops_with_the_counts(rig, on_limit):
    """Every reward 0, 3 rounds at most; and the same again, without sampling, when it is started again."""
    limits = ("algo.dynamic_filtering_max_rounds=3", f"algo.dynamic_filtering_on_limit={on_limit}")
    rig = rig(40, always(UNSOLVED), *FILTER, *limits)
    counts = "0 of 4 groups after 3 rounds .*: 12 groups generated, 0 kept, 12 with a mean score too low, 0 too high"
    with pytest.raises(RunFailedError, match=counts):
        await rig.train(rig.start())

    again = rig.start()
    with pytest.raises(RunFailedError, match=counts):
        await rig.train(again)

    assert again.session.draws == []


@pytest.mark.parametrize("on_limit", ["train", "stop"])
async def test_case_104_a_short_batch_at_the_limit(rig, on_limit):
    limits = ("algo.dynamic_filtering_max_rounds=3", f"algo.dynamic_filtering_on_limit={on_limit}")
    rig = rig(14, by_place({5: MIXED}, SOLVED), *FILTER, *limits)
    run = rig.start()

    if on_limit == "stop":
        with pytest.raises(RunFailedError, match="1 of 4 groups after 3 rounds .* 12 groups generated, 1 kept"):
            await rig.train(run)
        return
    await rig.train(run)

    assert rig.batches == [[5], []]
    assert metrics(rig, 0)["rollout/batch_groups"] == 1


async def test_the_last_iteration_may_train_nothing(rig):
    """5 prompts, the last one rejected: the version still goes up, and the run ends as planned."""
    rig = rig(5, by_place({4: SOLVED}, MIXED), *FILTER, "eval.dataset=h.jsonl")
    run = rig.start()

    await rig.train(run)

    assert rig.batches == [[0, 1, 2, 3], []]
    experience, _ = rig.store.stage(1, Stage.EXPERIENCE)
    assert (experience.rows, experience.parts, experience.body["metrics"]) == (0, (), {})
    assert rig.body(1, Stage.UPDATE)["version"] == 2
    assert rig.total == total(drawn=5, trained=4, filtered=1)
    assert [is_last(run, version) for version in range(4)] == [False, False, True, False]
    assert [evaluation_due(run, version) for version in range(3)] == [True, False, True]


@pytest.mark.parametrize("prompts", [3, 8])
async def test_case_24_a_run_that_would_train_nothing_at_all_fails(rig, prompts):
    rig = rig(prompts, always(SOLVED), *FILTER, "rollout.batch_size=8")

    with pytest.raises(RunFailedError, match=f"0 of 8 groups after all prompts: {prompts} groups generated"):
        await rig.train(rig.start())


@pytest.mark.parametrize("kind", [OVER, FILTER])
async def test_case_24_less_data_than_a_batch_is_one_short_step(rig, kind):
    rig = rig(3, always(MIXED), *kind, "rollout.batch_size=8", "rollout.vllm_generate_batch_size=16")

    await rig.train(rig.start())

    assert rig.batches == [[0, 1, 2]]


async def test_an_empty_batch_goes_on_into_the_next_epoch(rig):
    """5 prompts, 2 epochs, the last of each rejected."""
    rig = rig(5, by_place({4: SOLVED}, MIXED), *FILTER, "train.num_episodes=2")

    await rig.train(rig.start())

    assert rig.batches == [[(0, k) for k in range(4)], [(1, k) for k in range(4)], []]
    assert rig.total == total(drawn=10, trained=8, filtered=2)


# --- failures


@pytest.mark.parametrize(("on_error", "rows"), [("keep_group", 31), ("drop_group", 28)])
async def test_case_21_one_sample_of_32_fails(rig, on_error, rows):
    """8 prompts × 4; the reason is in the log."""
    rewards = (0.0, 1.0, "broken", 1.0)
    script = by_place({3: rewards}, (0.0, 1.0, 0.0, 1.0))
    rig = rig(
        8, script, *FILTER, "rollout.batch_size=8", "rollout.n_samples_per_prompt=4", f"rollout.on_error={on_error}"
    )

    await rig.train(rig.start())

    lost = int(on_error == "drop_group")
    assert rig.store.stage(0, Stage.EXPERIENCE)[0].rows == rows
    assert rig.total == total(drawn=8, trained=8 - lost, failed=lost)
    assert metrics(rig, 0)["rollout/failed"] == 1
    errors = {row.error for part in rig.store.rounds(0)[0].parts for row in rig.store.read_trajectories([part])}
    assert errors == {None, "ValueError: the environment is broken"}


async def test_a_group_without_a_usable_sample_has_failed_and_is_replaced(rig):
    """p1 has no reward, p2 no answer; a sample without a score is left out of its group's mean."""
    script = by_place({1: ("no", "no"), 2: ("broken", "broken"), 3: (1.0, "no")}, MIXED)
    rig = rig(12, script, *FILTER)

    await rig.train(rig.start(), iterations=1)

    assert rig.batches == [[0, 4, 5, 6]]
    assert rig.body(0, Stage.EXPERIENCE)["ledger"] == total(drawn=8, trained=4, filtered=1, failed=2, buffered=1)
    assert rig.body(0, Stage.REWARD)["failures"] == {"no": 3, "ValueError: the environment is broken": 2}


async def test_rewards_that_all_fail_stop_the_run_after_one_round(rig):
    rig = rig(40, always(("no server", "no server")), *FILTER)
    run = rig.start()

    with pytest.raises(RunFailedError, match=r"4 failed; failures: \[\('no server', 8\)\]"):
        await rig.train(run)

    assert len(run.session.draws) == 1


# --- crashes


async def test_a_crash_between_rounds_goes_on_with_the_next_round(rig):
    """p0 to p3 are drawn in round 0; killed before round 1."""
    rig = rig(12, by_place({0: SOLVED}, MIXED), *FILTER)
    with pytest.raises(Killed):
        await rig.train(rig.start(crash=("rollout", 1)))

    second = rig.start()
    await rig.train(second, iterations=1)

    [draw] = second.session.draws
    assert (draw.round, draw.cursor.offset) == (1, 4)
    assert draw.recorded == {part.path for part in rig.store.rounds(0)[0].parts}
    assert rig.batches == [[1, 2, 3, 4]]
    assert rig.total == total(drawn=8, trained=4, filtered=1, buffered=3)


async def test_a_crash_inside_a_round_repeats_only_the_groups_in_flight(rig):
    """Round 0 is recorded; in round 1 the engine dies while p6 speaks."""
    rig = rig(12, by_place({0: SOLVED}, MIXED), *FILTER)
    first = rig.start(script=by_place({0: SOLVED, 6: (None, None)}, MIXED))
    with pytest.raises(WorkerError):
        await rig.train(first)

    second = rig.start()
    await rig.train(second, iterations=1)

    assert second.session.player.sampled == [(0, 6), (0, 6)]
    assert rig.batches == [[1, 2, 3, 4]]
    assert rig.body(0)["resumed_groups"] == 3


async def test_a_crash_between_scoring_and_recording_scores_again_and_samples_nothing(rig):
    rig = rig(12, always(MIXED), *FILTER)
    with pytest.raises(Killed):
        await rig.train(rig.start(crash=("score", 0)))

    second = rig.start()
    await rig.train(second, iterations=1)

    assert second.session.player.sampled == []
    assert second.session.source.scored == 8
    assert rig.batches == [[0, 1, 2, 3]]


async def test_a_shard_of_other_groups_is_left_out(rig):
    rig = rig(4, always(MIXED), *FILTER)
    with pytest.raises(Killed):
        await rig.train(rig.start(crash=("score", 0)))
    [row, *_] = rig.store.read_trajectories(rig.store.published_parts(0, Stage.ROLLOUT))
    rig.store.publish_trajectories(0, [replace(row, group_id="0000-00000009")])

    await rig.train(rig.start())

    assert rig.total == total(drawn=4, trained=4)


async def test_killed_anywhere_the_run_is_the_same(rig):
    def script(place):
        return (MIXED, SOLVED, MIXED, UNSOLVED, MIXED)[place[1] % 5]

    overrides = (*FILTER, "rollout.vllm_generate_batch_size=5", "train.num_episodes=2")
    straight = rig(13, script, *overrides)
    await straight.train(straight.start())
    killed = rig(13, script, *overrides)
    for crash in [
        ("rollout", 1),
        ("score", 0),
        ("rollout", 0),
        ("update", 0),
        ("score", 1),
        ("update", 1),
        ("update", 0),
    ]:
        with pytest.raises(Killed):
            await killed.train(killed.start(crash=crash))

    await killed.train(killed.start())

    assert killed.batches == straight.batches
    assert killed.total == straight.total
    assert killed.total == total(drawn=26, trained=16, filtered=10)


# --- who reads the shards


async def test_a_filled_batch_is_not_scored_again(rig):
    rig = rig(4, always(MIXED), *FILTER)
    run = rig.start()

    await rig.train(run)

    assert run.session.source.scored == 8
    assert rig.body(0, Stage.REWARD)["metrics"]["reward/mean"] == 0.5


async def test_the_running_scale_of_rewards_goes_from_round_to_round_and_on(rig):
    """p0 and p1 are rejected: iteration 0 scores 16 samples in two rounds, iteration 1 nothing, iteration 2 the last 8."""
    lots = ("rollout.batch_size=3", "rollout.vllm_generate_batch_size=4", "reward.normalize_enable=true")
    rig = rig(12, by_place({0: SOLVED, 1: SOLVED}, MIXED), *FILTER, *lots)

    await rig.train(rig.start())

    counts = [rig.body(k, Stage.REWARD)["norm_state"]["scored"]["count"] for k in range(4)]
    assert counts == [16, 16, 24, 24]


async def test_rewards_are_reported_of_the_batch(rig):
    """Two groups of four are rejected with rewards of 1: their rewards lie in the same shards."""
    rig = rig(8, by_place({0: SOLVED, 1: SOLVED}, MIXED), *FILTER)

    await rig.train(rig.start(), iterations=1)

    assert rig.body(0, Stage.REWARD)["metrics"]["reward/mean"] == 0.5


async def test_queries_show_the_groups_of_each_batch_once(rig):
    rig = rig(7, by_place({2: SOLVED}, MIXED), *OVER, "algo.dynamic_filtering_enable=true")

    await rig.train(rig.start())

    found = [
        sorted({row["group_id"] for row in trajectories(rig.store, iteration).to_pylist()})
        for iteration in rig.store.completed_iterations()
    ]
    assert [[int(group[-1]) for group in batch] for batch in found] == [[0, 1], [3, 4], [5, 6]]
    assert len(trajectories(rig.store)) == 12
    assert all(row["reward"] is not None for row in trajectories(rig.store).to_pylist())


async def test_a_row_knows_its_round(rig):
    rig = rig(8, by_place({0: SOLVED}, MIXED), *FILTER)

    await rig.train(rig.start(), iterations=1)

    rows = trajectories(rig.store).to_pylist()
    assert {int(row["group_id"][-1]): row["round"] for row in rows} == {1: 0, 2: 0, 3: 0, 4: 1}


async def test_without_filtering_and_over_sampling_there_are_no_rounds(rig):
    rig = rig(3, always(SOLVED), *PLAIN)

    await rig.train(rig.start())

    assert rig.batches == [[0, 1], [2]]
    assert rig.store.rounds(0) == []
    assert rig.body(0).keys() == {
        *("started_at", "seconds", "cursor_in", "cursor_out", "drawn", "resumed_groups", "metrics")
    }


# --- the law


def misled(run, change):
    """The run's rollout, with an outcome that is not what was asked for."""
    honest = run.session.rollout

    async def rollout(draw):
        return await change(honest, draw)

    run.session.rollout = rollout


async def test_a_group_that_vanishes_is_noticed(rig):
    rig = rig(4, always(MIXED), *PLAIN)
    run = rig.start()

    async def forgets(honest, draw):
        return replace(await honest(draw), parts=())

    misled(run, forgets)

    with pytest.raises(
        RunFailedError, match=r"iteration 0: prompts are lost or counted twice: Ledger\(drawn=2.*trained=0"
    ):
        await rig.train(run)


async def test_a_cursor_that_does_not_move_is_noticed_at_once(rig):
    rig = rig(12, by_place({0: SOLVED}, MIXED), *FILTER)
    run = rig.start()

    async def stands_still(honest, draw):
        return replace(await honest(draw), cursor=draw.cursor)

    misled(run, stands_still)

    with pytest.raises(RunFailedError, match="round 0: prompts are drawn twice"):
        await rig.train(run)


async def test_a_prompt_that_is_drawn_twice_is_noticed(rig):
    rig = rig(12, by_place({0: SOLVED}, MIXED), *FILTER)
    run = rig.start()

    async def repeats(honest, draw):
        outcome = await honest(replace(draw, cursor=PromptCursor()))
        return replace(outcome, cursor=PromptCursor(0, draw.cursor.offset + 4))

    misled(run, repeats)

    with pytest.raises(RunFailedError, match="round 1: prompts are drawn twice: .* groups .'0000-00000000'"):
        await rig.train(run)


async def test_failures_are_accounted_for_without_rounds_too(rig):
    rig = rig(2, by_place({1: ("no", "no")}, MIXED), *PLAIN)

    await rig.train(rig.start())

    assert rig.total == total(drawn=2, trained=1, failed=1)
