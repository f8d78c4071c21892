"""Which token lies on which rank, and who is asked about it; the ranks themselves are in tests/pipeline."""

import pytest
import torch

from rlhf_core.training.packing import before_actions, packed_inputs
from rlhf_core.training.ranks import RankInfo
from rlhf_core.training.sequence_parallel import WHOLE, Asked, SequenceSplit

IDS_BT = torch.tensor([[11, 12, 13], [21, 22, 0]])
KEPT_BT = torch.tensor([[True, True, True], [True, True, False]])


def halves():
    return [SequenceSplit(2, index) for index in range(2)]


def test_parts_of_a_row_are_the_row_and_padding_that_is_a_sample_of_its_own():
    """5 tokens over 2 ranks: 11 12 13 | 21 22 _"""
    first, second = (packed_inputs(IDS_BT, KEPT_BT, split) for split in halves())

    assert first["input_ids"].tolist() == [[11, 12, 13]]
    assert second["input_ids"].tolist() == [[21, 22, 0]]
    assert second["position_ids"].tolist() == [[0, 1, 0]]
    assert first["cu_seq_lens_q"].tolist() == second["cu_seq_lens_q"].tolist() == [0, 3, 5, 6]
    assert first["sequence_split"] == SequenceSplit(2, 0)


def test_a_whole_row_is_given_to_the_model_as_ever():
    packed = packed_inputs(IDS_BT, KEPT_BT)

    assert packed["input_ids"].tolist() == [[11, 12, 13, 21, 22]]
    assert "sequence_split" not in packed


def test_actions_are_asked_for_at_the_token_before():
    actions_BT = torch.tensor([[False, True, True], [False, True, False]])

    assert before_actions(actions_BT, KEPT_BT).tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("places", "here", "which"),
    [
        ([0, 2, 3, 4], ([0, 2], [0, 1]), ([0, 1], [2, 3])),
        ([1, 2], ([1, 2], [0]), ([0, 1], [0])),  # the second rank has none that is asked for, and looks at its first
        ([], ([], []), ([], [])),
    ],
)
def test_each_rank_looks_at_its_own_tokens(places, here, which):
    """Three tokens on each of two ranks."""
    places_N = torch.tensor(places, dtype=torch.long)

    asked = [Asked.of(places_N, torch.zeros((1, 3, 1)), split) for split in halves()]

    assert [part.places_M.tolist() for part in asked] == list(here)
    assert [part.chosen_M.tolist() for part in asked] == list(which)


def test_one_rank_is_asked_about_everything_in_order():
    asked = Asked.of(torch.tensor([0, 2]), torch.arange(3.0).reshape(1, 3, 1), WHOLE)

    assert asked.hidden(torch.arange(3.0).reshape(1, 3, 1)).tolist() == [[0.0], [2.0]]
    assert asked.everywhere(torch.tensor([5.0, 7.0])).tolist() == [5.0, 7.0]


@pytest.mark.parametrize(("rank", "group", "answers"), [(0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False)])
def test_neighbours_share_rows_and_one_of_them_answers(rank, group, answers):
    info = RankInfo(rank, 4, rank, "127.0.0.1", 1, "cpu", sequence_parallel_size=2)

    assert (info.data_ranks, info.data_rank, info.answers) == (2, group, answers)
    assert info.group_budget(100) == 200
    assert info.group_budget(None) is None
