"""What agents may answer."""

import numpy as np
import pytest
import torch

from rlhf_core.agents.openai.answer import AgentAnswer, to_answer
from rlhf_core.errors import AgentError

pytestmark = pytest.mark.agents


@pytest.mark.parametrize(
    "said",
    [1, 1.0, True, np.float32(1), torch.tensor(1.0), [1], torch.tensor([1.0]), {"reward": 1}, {"rewards": [1.0]}],
)
def test_a_reward_of_one(said):
    assert to_answer(said, "it") == AgentAnswer(reward=1.0)


@pytest.mark.parametrize("said", [None, {"reward": None}, {"rewards": None, "scores": None}])
def test_no_reward(said):
    assert to_answer(said, "it") == AgentAnswer()


def test_score_and_logs():
    said = {"reward": 0.5, "scores": torch.tensor([1]), "extra_logs": {"steps": 3, "note": "text", "none": None}}

    assert to_answer(said, "it") == AgentAnswer(0.5, 1.0, {"steps": 3.0, "dropped_logs": 1.0})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (float("nan"), r"^the reward of it is nan: a finite number is wanted$"),
        (10**400, "beyond the range of float"),
        ("1.0", r"^the reward of it is the str '1.0': a number is wanted$"),
        ([1, 2], r"the list \[1, 2\]"),
        (torch.tensor([1.0, 2.0]), "one number is wanted"),
        ({"reward": 1, "score": "high"}, "the score of it is the str 'high'"),
        ({"result": 1}, r"^it answered a dict without 'reward': its keys are \['result'\]$"),
        (b"x" * 1000, "…"),
    ],
)
def test_what_is_no_reward_is_an_error_that_names_it(said, message):
    with pytest.raises(AgentError, match=message):
        to_answer(said, "it")
