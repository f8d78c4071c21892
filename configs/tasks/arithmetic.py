"""Short additions from the package reasoning-gym (``basic_arithmetic``, two terms), for a small instruct model.

    {"input": "What is 17 + 4? Answer with the number only.", "label": "21"}

Terms are 0 to ``largest`` = 29: 900 questions. SmolLM2-135M-Instruct (bf16, 20 tokens) answers 0.11 of 288 at
temperature 1 and 0.44 of 96 greedily when the last number is scored. Of ten wordings none did better beyond noise.

Held out means held out: a question belongs to the test split if the SHA-256 of its *unordered* terms says so (one in
four), whatever seed draws it. So 4 + 17 is never trained on if 17 + 4 is tested.
Use: ``data.prompt_dataset=configs/tasks/arithmetic.py:prompts?count=600&split=train``.
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

TEST_SHARE = 4  # one question in four is held out


def prompts(count: int = 600, seed: int = 0, split: str = "train", largest: int = 29) -> Iterator[dict[str, Any]]:
    """``count`` different questions of a split, in a seeded order.

    Raises:
        ValueError: The split is unknown or has fewer questions.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: use 'train' or 'test'")
    available = sum(split_of(a, b) == split for a, b in itertools.product(range(largest + 1), repeat=2))
    if count > available:
        raise ValueError(f"count={count}: the {split} split of additions up to {largest} has {available} questions")
    in_split = (item for item in _additions(seed, largest) if split_of(*_terms(item)) == split)
    for item in itertools.islice(in_split, count):
        yield {
            "input": f"What is {item['metadata']['expression']}? Answer with the number only.",
            "label": item["answer"],
        }


def split_of(a: int, b: int) -> str:
    """The split of ``a + b`` and ``b + a``."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return "test" if digest[0] % TEST_SHARE == 0 else "train"


def _additions(seed: int, largest: int) -> Iterator[dict[str, Any]]:
    """Different items of the generator with both terms at most ``largest``, without end once all were seen."""
    from reasoning_gym.arithmetic import BasicArithmeticDataset, BasicArithmeticDatasetConfig

    items = BasicArithmeticDataset(
        BasicArithmeticDatasetConfig(
            min_terms=2,
            max_terms=2,
            max_digits=len(str(largest)),
            min_digits=len(str(largest)),
            operators=("+",),
            allow_parentheses=False,
            seed=seed,
        )
    )
    seen = set()
    for index in itertools.count():
        terms = _terms(item := items[index])
        if max(terms) <= largest and terms not in seen:
            seen.add(terms)
            yield item


def _terms(item: dict[str, Any]) -> tuple[int, int]:
    a, b = item["metadata"]["expression"].split(" + ")
    return int(a), int(b)
