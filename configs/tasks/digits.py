"""Prompts for the task "share of ASCII digits in the answer": a random model learns it within a few iterations.

The answer alone is scored (reward function ``digits``), so the prompts only have to differ, and rows have no label.
Use: ``data.prompt_dataset=configs/tasks/digits.py:prompts?count=256&seed=0``.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

VERBS = ("Write", "Give me", "Name", "Show", "Print", "List", "Recall", "Make up")
THINGS = (
    "a phone number",
    "a year",
    "a price",
    "a date",
    "a PIN",
    "an area code",
    "a score",
    "a distance",
    "a speed",
    "a time",
)
PLACES = ("in Rome", "in Oslo", "in Lima", "in Cairo", "in Kyoto", "in Perth", "at sea", "at home")


def prompts(count: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """``count`` different prompts such as "Give me a year in Oslo: "; at most 640."""
    choices = list(itertools.product(VERBS, THINGS, PLACES))
    for words in random.Random(seed).sample(choices, count):
        yield {"input": " ".join(words) + ": ", "label": None}
