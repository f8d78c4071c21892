from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rlhf_core.batching import collate_experiences, collate_pairs, collate_tokens
from rlhf_core.errors import TrainingError
from rlhf_core.records import ActionRange, Experience


def row(ids, ranges, temperature=1.0, ref=True, constrained=False):
    ramp = np.arange(len(ids), dtype=np.float32)
    return Experience(
        group_id="g",
        sample_index=0,
        segment_index=0,
        token_ids=np.array(ids, dtype=np.int32),
        action_ranges=tuple(ActionRange(*r) for r in ranges),
        rollout_logprobs=-ramp,
        old_logprobs=-2 * ramp,
        ref_logprobs=-3 * ramp if ref else None,
        values=None,
        advantages=4 * ramp,
        returns=ramp,
        reward=0.0,
        shaped_reward=0.0,
        temperature=temperature,
        constrained=constrained,
    )


def test_tokens_are_padded_to_the_right():
    batch = collate_tokens([row([11, 12, 40, 2], [(2, 4)], 0.7), row([5, 6], [(1, 2)])])

    assert batch.input_ids_BT.tolist() == [[11, 12, 40, 2], [5, 6, 0, 0]]
    assert batch.action_mask_BT.tolist() == [[False, False, True, True], [False, True, False, False]]
    torch.testing.assert_close(batch.temperature_B, torch.tensor([0.7, 1.0]))


def test_several_action_ranges_leave_the_environment_out():
    batch = collate_tokens([row([1, 2, 3, 4, 5, 6], [(1, 2), (4, 6)])])

    assert batch.action_mask_BT.int().tolist() == [[0, 1, 0, 0, 1, 1]]


def test_per_token_arrays_keep_index_t_for_token_t():
    batch = collate_experiences([row([1, 2, 3], [(1, 3)], constrained=True), row([1, 2], [(1, 2)])])

    assert batch.rollout_logprobs_BT.tolist() == [[0, -1, -2], [0, -1, 0]]
    assert batch.old_logprobs_BT.tolist() == [[0, -2, -4], [0, -2, 0]]
    assert batch.ref_logprobs_BT.tolist() == [[0, -3, -6], [0, -3, 0]]
    assert batch.advantages_BT.tolist() == [[0, 4, 8], [0, 4, 0]]
    assert batch.constrained_B.tolist() == [True, False]


def test_no_reference_gives_none():
    assert collate_experiences([row([1, 2], [(1, 2)], ref=False)]).ref_logprobs_BT is None


def test_reference_on_some_rows_only_is_refused():
    with pytest.raises(TrainingError, match="on 1 of 2 rows"):
        collate_experiences([row([1, 2], [(1, 2)]), row([1, 2], [(1, 2)], ref=False)])


def test_log_probs_that_the_update_will_say_are_none_and_those_of_some_rows_are_refused():
    known = row([1, 2], [(1, 2)])
    unknown = replace(known, old_logprobs=None)

    assert collate_experiences([unknown]).to(torch.device("cpu")).old_logprobs_BT is None
    with pytest.raises(TrainingError, match="old log-probs on 1 of 2 rows"):
        collate_experiences([known, unknown])


@pytest.mark.parametrize("bad", [(0, 2), (1, 4)])
def test_action_that_nothing_predicts_or_outside_the_row_is_refused(bad):
    with pytest.raises(TrainingError, match=r"action range \["):
        collate_tokens([replace(row([1, 2, 3], []), action_ranges=(ActionRange(*bad),))])


@dataclass
class Pair:
    chosen: Experience
    rejected: Experience


def test_pairs_are_their_chosen_rows_and_then_their_rejected_rows():
    pairs = [
        Pair(row([1, 2, 3], [(2, 3)]), row([1, 2], [(1, 2)])),
        Pair(row([4, 5], [(1, 2)]), row([4, 6, 7, 8], [(1, 4)])),
    ]

    batch = collate_pairs(pairs)

    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [1, 2, 0, 0], [4, 6, 7, 8]]
    assert batch.action_mask_BT.int().tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]]
