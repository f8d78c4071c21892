"""Serial numbers: a task for SFT, a reward model and PPO in turn, which a random model learns in seconds on a CPU.

    sft      {"input": "Give me a serial number for a lamp in Rome: ", "output": "q7d04b81"}
    pairs    {"prompt": ..., "chosen": "7204k813", "rejected": "qd0wbtz1"}     chosen has more digits
    prompts  {"input": ..., "label": null}

An answer is 6 to 12 characters, letters or digits, and its share of digits is anything from 0 to 1 with equal chance: so
SFT teaches the form (and to stop), and leaves the reward model something to prefer. The two answers of a pair are equally
long and differ by at least ``MARGIN`` of their length in digits. The true property, the share of digits, is what the
reward function ``digits`` measures: PPO with the reward model must raise it too.

Held out means held out: a prompt belongs to the test split if its SHA-256 says so (one in four), whatever seed draws it.
Use: ``data.dataset=configs/tasks/preferences.py:pairs?count=512&split=train``.
"""

import hashlib
import itertools
import random
import string
from collections.abc import Iterator
from typing import Any

VERBS = ("Give me", "Make up", "Show", "Print", "Invent", "Write", "Recall", "I need")
THINGS = (
    "a lamp",
    "a clock",
    "a boat",
    "a chair",
    "a radio",
    "a door",
    "a bell",
    "a train",
    "a kite",
    "a drum",
    "a robot",
)
PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto", "Perth", "Quito", "Bonn", "Riga", "Lagos", "Delhi", "Seoul")
TEST_SHARE = 4  # one prompt in four is held out
LENGTHS = range(6, 13)  # characters of an answer
MARGIN = 0.25  # least difference of a pair in digits, as a share of the length


def sft(count: int = 512, seed: int = 0, split: str = "train") -> Iterator[dict[str, Any]]:
    """``count`` different prompts of a split, each with one answer."""
    rng = random.Random(f"sft {seed}")
    for prompt in _questions(count, seed, split):
        length = rng.choice(LENGTHS)
        yield {"input": prompt, "output": _answer(rng, length, rng.randint(0, length))}


def pairs(count: int = 512, seed: int = 0, split: str = "train") -> Iterator[dict[str, Any]]:
    """``count`` different prompts of a split, each with a better and a worse answer."""
    rng = random.Random(f"pairs {seed}")
    for prompt in _questions(count, seed, split):
        length = rng.choice(LENGTHS)
        fewer, more = 0, 0
        while more - fewer < MARGIN * length:
            fewer, more = sorted((rng.randint(0, length), rng.randint(0, length)))
        yield {"prompt": prompt, "chosen": _answer(rng, length, more), "rejected": _answer(rng, length, fewer)}


def prompts(count: int = 256, seed: int = 0, split: str = "train") -> Iterator[dict[str, Any]]:
    """``count`` different prompts of a split, without answers."""
    for prompt in _questions(count, seed, split):
        yield {"input": prompt, "label": None}


def split_of(prompt: str) -> str:
    """The split a prompt belongs to."""
    return "test" if hashlib.sha256(prompt.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def _questions(count: int, seed: int, split: str) -> list[str]:
    """``count`` different prompts of a split in a seeded order.

    Raises:
        ValueError: The split is unknown or has fewer prompts.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: use 'train' or 'test'")
    words = itertools.product(VERBS, THINGS, PLACES)
    questions = [f"{verb} a serial number for {thing} in {place}: " for verb, thing, place in words]
    in_split = [question for question in questions if split_of(question) == split]
    if count > len(in_split):
        raise ValueError(f"count={count}: the {split} split has {len(in_split)} prompts")
    return random.Random(seed).sample(in_split, count)


def _answer(rng: random.Random, length: int, digits: int) -> str:
    characters = [*rng.choices(string.digits, k=digits), *rng.choices(string.ascii_lowercase, k=length - digits)]
    rng.shuffle(characters)
    return "".join(characters)
