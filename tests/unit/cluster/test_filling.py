"""What a batch asks for next, and which rounds it refuses: by its recorded rounds alone.

A partial rollout with batches of 4 groups and 16 in flight. Groups are named by their place in epoch 0.
"""

from dataclasses import replace

import pytest
from minimal_config import config

from rlhf_core.cluster.filling import Filling
from rlhf_core.errors import RunFailedError
from rlhf_core.records import KeptGroup, OpenGroup, PromptCursor, Round

PARTIAL = (
    *("train.async_enable=true", "train.partial_rollout_enable=true", "train.async_queue_size=2"),
    *("rollout.batch_size=4", "rollout.vllm_generate_batch_size=16", "rollout.n_samples_per_prompt=2"),
    "algo.dynamic_filtering_enable=true",
)


def group(number):
    return PromptCursor(0, number).group_id


def kept(number, spoken_since, iteration=4):
    return KeptGroup(group(number), 0, iteration, 0, spoken_since)


def unfinished(*numbers, since=4):
    return tuple(OpenGroup(group(number), since) for number in numbers)


def filling(carried=(), in_flight=(), cursor=20, iteration=5):
    return Filling(config(*PARTIAL), iteration, tuple(carried), PromptCursor(0, cursor), carried_unfinished=in_flight)


def played(judged, cursor, drawn, number=0, **fields):
    """``judged``: number of a group to its verdict."""
    return Round(
        iteration=5,
        number=number,
        epoch=0,
        cursor_out=PromptCursor(0, cursor),
        drawn=drawn,
        verdicts={group(n): verdict for n, verdict in judged.items()},
        places={},
        parts=(),
        scored={},
        **fields,
    )


# --- what is asked for


def test_a_draw_fills_up_what_is_in_flight():
    draw = filling(in_flight=unfinished(*range(6))).next_draw

    assert (draw.prompts, len(draw.unfinished), draw.again, draw.wanted) == (10, 6, (), 4)
    assert draw.oldest_version == 3


def test_what_is_too_old_is_asked_for_again_and_is_not_selected():
    """Iteration 5, 2 versions at most: version 3 is young enough."""
    batch = filling([kept(0, 2), kept(1, 3)], (*unfinished(8, since=2), *unfinished(9, since=3)))

    draw = batch.next_draw

    assert (draw.again, draw.unfinished) == ((group(0), group(8)), unfinished(9, since=3))
    assert (draw.prompts, draw.wanted) == (13, 3)
    assert [found.group_id for found in batch.selected] == [group(1)]
    assert [found.group_id for found in batch.buffered] == [group(0)]


def test_what_is_too_old_waits_while_the_batch_is_full_without_it():
    batch = filling([kept(0, 2), *(kept(number, 3) for number in range(1, 6))])

    assert not batch.needs_round
    assert [found.group_id for found in batch.selected] == [group(number) for number in range(1, 5)]
    assert [found.group_id for found in batch.buffered] == [group(0), group(5)]


@pytest.mark.parametrize(
    ("judged", "wanted"),
    [
        ({0: "kept", 1: "kept", 2: "kept", 3: "too_low"}, 2),  # 1 / .75
        ({0: "kept", 1: "too_low", 2: "too_low", 3: "too_low"}, 8),  # 3 / .25, of which half of 16 are waited for
        ({0: "too_low", 1: "too_low"}, 8),
    ],
)
def test_more_are_waited_for_where_many_are_rejected_but_not_the_slow_ones(judged, wanted):
    batch = filling(cursor=0).with_round(played(judged, 16, 16, unfinished=unfinished(*range(len(judged), 16))))

    assert batch.next_draw.wanted == wanted


def test_at_the_end_of_an_epoch_nothing_is_drawn_while_groups_of_it_are_in_flight():
    batch = replace(filling(in_flight=unfinished(19)), cursor_in=PromptCursor(1, 0))

    assert (batch.next_draw.prompts, batch.needs_round, batch.at_end) == (0, True, False)


def test_what_is_sampled_again_takes_the_place_of_what_was_kept():
    batch = filling([kept(0, 2)]).with_round(played({0: "kept", 20: "too_low"}, 21, 1, again=(group(0),)))

    assert batch.kept == (kept(0, 5, iteration=5),)
    assert batch.counts.generated == 2


# --- what is refused


def test_a_group_that_was_in_flight_and_is_nowhere_is_noticed():
    with pytest.raises(
        RunFailedError, match=r"groups \['0000-00000003'\] were in flight, and are neither finished nor"
    ):
        filling(in_flight=unfinished(3, 4)).with_round(played({4: "kept"}, 30, 10))


def test_a_group_that_was_kept_and_not_asked_for_again_must_not_be_judged_twice():
    with pytest.raises(RunFailedError, match=r"drawn twice: .* groups \['0000-00000001'\]"):
        filling([kept(1, 4)]).with_round(played({1: "kept"}, 30, 10))


def test_a_round_without_new_prompts_leaves_the_cursor_where_it_is():
    batch = filling(in_flight=unfinished(3))

    assert batch.with_round(played({3: "kept"}, 20, 0)).kept == (kept(3, 5, iteration=5),)
    with pytest.raises(RunFailedError, match="drawn twice"):
        batch.with_round(played({3: "kept", 20: "kept"}, 20, 1))
