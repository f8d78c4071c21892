"""Reward functions that need no file: ``reward.functions=[{use: last_number}]``.

Each follows the contract of a user's function; its keyword arguments come from ``args``. A label that cannot be
used is an error of that sample, never a wrong answer.
"""

from __future__ import annotations

import logging
import re
import string
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Text = Sequence[str]

# "1,234" is one number, "1,2" are two; "7-2" holds 7 and 2, but "= -2" holds -2.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
DIGITS = frozenset(string.digits)


def exact_match(
    queries: Text,
    prompts: Text,
    labels: Sequence[Any],
    *,
    answers: Text,
    strip: bool = True,
    ignore_case: bool = False,
) -> list[float]:
    """1 if the answer is the label's text, else 0; surrounding whitespace does not count unless ``strip=False``."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return [
        float(normal(answer) == normal(_label_text("exact_match", label)))
        for answer, label in zip(answers, labels, strict=True)
    ]


def last_number(queries: Text, prompts: Text, labels: Sequence[Any], *, answers: Text) -> list[float]:
    """1 if the last number of the answer equals the (last) number of the label, else 0.

    >>> last_number([""], [""], ["12"], answers=["3 + 9 is 12.0."])
    [1.0]
    """
    return [
        float(find_last_number(answer) == _label_number(label)) for answer, label in zip(answers, labels, strict=True)
    ]


def digits(queries: Text, prompts: Text, labels: Sequence[Any], *, answers: Text) -> list[float]:
    """Share of ASCII digits among the characters of the answer; 0 for an empty one."""
    return [sum(character in DIGITS for character in answer) / max(len(answer), 1) for answer in answers]


def math(queries: Text, prompts: Text, labels: Sequence[Any], *, answers: Text) -> list[float]:
    """1 if the answer is mathematically equal to the label, else 0: the package math-verify.

    Its own time limits work by ``signal.alarm``; they are off, the limit of the call holds instead.
    """
    from math_verify import parse, verify  # a second to import, and only for those who use it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the limits that are off

    def score(answer: str, label: Any) -> float:
        text = _label_text("math", label)
        gold = parse(text if "\\boxed" in text or "$" in text else f"${text}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math: no mathematical expression in the label {text!r}")
        return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))

    return [score(answer, label) for answer, label in zip(answers, labels, strict=True)]


def regex(
    queries: Text,
    prompts: Text,
    labels: Sequence[Any],
    *,
    answers: Text,
    pattern: str,
    mode: str = "full",
) -> list[float]:
    """1 if the pattern matches the whole answer (``mode="full"``) or a part of it (``"search"``), else 0."""
    compiled = re.compile(pattern)
    modes = {"full": compiled.fullmatch, "search": compiled.search}
    if mode not in modes:
        raise ValueError(f"mode={mode!r}: use 'full' or 'search'")
    return [float(modes[mode](answer) is not None) for answer in answers]


def length(
    queries: Text, prompts: Text, labels: Sequence[Any], *, answers: Text, target: int, scale: float = 1.0
) -> list[float]:
    """Minus the distance of the answer's length from ``target`` characters, divided by ``scale``."""
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be above 0")
    return [-abs(len(answer) - target) / scale for answer in answers]


BUILTINS: dict[str, Callable[..., list[float]]] = {
    function.__name__: function for function in (exact_match, last_number, digits, math, regex, length)
}


def find_last_number(text: str) -> Decimal | None:
    """The last number in a text: ``"1,234"`` and ``"1234.0"`` are equal."""
    last = None
    for match in NUMBER.finditer(text):
        last = match.group()
    return None if not last else Decimal(last.replace(",", "").replace("\u2212", "-"))


def _label_number(label: Any) -> Decimal:
    number = find_last_number(_label_text("last_number", label))
    if number is None:
        raise ValueError(f"last_number: no number in the label {label!r}")
    return number


def _label_text(name: str, label: Any) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise ValueError(f"{name} needs a text or a number as label, got {label!r}: check data.label_key")
    return str(label)
