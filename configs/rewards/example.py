"""Two reward functions of one's own. Use them with

reward:
  functions:
    - use: configs/rewards/example.py:ends_with_number      # a batch a call
    - {use: configs/rewards/example.py:shortest_wins, weight: 0.1}  # a group a call
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_core.rewards import group_wise


def ends_with_number(queries: list[str], prompts: list[str], labels: list[Any], answers: list[str]) -> dict[str, Any]:
    """1 for a right last number, 0.1 for a wrong one, 0 for none; success is judged by the first alone."""
    numbers = [re.findall(r"-?\d+", answer) for answer in answers]
    right = [bool(found) and found[-1] == str(label) for found, label in zip(numbers, labels, strict=True)]
    rewards = [1.0 if ok else 0.1 if found else 0.0 for ok, found in zip(right, numbers, strict=True)]
    return {"rewards": rewards, "scores": right, "extra_logs": {"num_numbers": [len(found) for found in numbers]}}


@group_wise
def shortest_wins(queries: list[str], prompts: list[str], labels: list[Any], answers: list[str]) -> list[float]:
    """1 for the shortest answer of each group."""
    shortest = min(len(answer) for answer in answers)
    return [float(len(answer) == shortest) for answer in answers]
