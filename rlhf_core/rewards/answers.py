"""From whatever a reward function or server answered to one typed row per sample. A function's in its worker.

=====================================  ==========================================================================
the answer                             each of its samples gets
=====================================  ==========================================================================
list, tuple, array, tensor of numbers  that reward; int and bool become float, numpy and torch scalars are unpacked
dict with ``rewards``                  the same from ``rewards``; ``scores`` and ``extra_logs`` where present
one number, call of one sample         that reward
None, NaN, inf, a string (one entry)   an error for that sample, naming it
wrong length, another type             an error for every sample of the call, naming the lengths or the type
=====================================  ==========================================================================

``scores`` follow the rules of ``rewards``, except that None means "no score here". In ``extra_logs`` numbers become
metrics, one number stands for all samples, None is left out, and whatever else (text, NaN, lists of another length)
is left out and counted in the metric ``dropped_logs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.processes.values import finite, shown

DROPPED_LOGS = "dropped_logs"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who answered, for messages."""

    name: str
    one_at_a_time: str  # the setting for one that looks at a single sample


FUNCTION = Speaker("the reward function", "reward.batch_size=1")
SERVER = Speaker("the reward server", "reward.remote_batch_size=1")


@dataclass(slots=True)
class Row:
    """What was said about one sample. ``error`` is set exactly if ``reward`` is not."""

    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


class _BadAnswerError(ValueError):
    """The message says what was answered, for the row that has it."""


def to_rows(answer: Any, num_samples: int, speaker: Speaker = FUNCTION) -> list[Row]:
    """One row per sample of the call."""
    fields = answer if isinstance(answer, Mapping) else {"rewards": answer}
    try:
        rewards = _column(fields, "rewards", num_samples, speaker)
        given = fields.get("scores") is not None
        scores = _column(fields, "scores", num_samples, speaker) if given else [None] * num_samples
    except _BadAnswerError as error:
        return [Row(error=str(error)) for _ in range(num_samples)]
    rows = [_row(reward, score, speaker) for reward, score in zip(rewards, scores, strict=True)]
    _add_logs(rows, fields.get("extra_logs"))
    return rows


def _row(reward: Any, score: Any, speaker: Speaker) -> Row:
    try:
        return Row(reward=_number(reward), score=None if score is None else _number(score))
    except _BadAnswerError as error:
        return Row(error=f"{speaker.name} answered {error} for this sample: it must answer a finite number")


def _column(fields: Mapping[Any, Any], key: str, num_samples: int, speaker: Speaker) -> list[Any]:
    if key not in fields:
        raise _BadAnswerError(f"{speaker.name} answered a dict without {key!r}; its keys are {shown(list(fields))}")
    values = _plain(fields[key])
    if isinstance(values, int | float) and num_samples == 1:
        return [values]
    remedy = f"answer a list of {num_samples}, or set {speaker.one_at_a_time} if it looks at one sample only"
    if not isinstance(values, list | tuple):
        raise _BadAnswerError(f"{speaker.name} answered {shown(values)} as {key} of {num_samples} samples: {remedy}")
    if len(values) != num_samples:
        raise _BadAnswerError(f"{speaker.name} answered {len(values)} {key} for {num_samples} samples: {remedy}")
    return list(values)


def _add_logs(rows: list[Row], logs: Any) -> None:
    """Spread ``extra_logs`` over the rows."""
    if logs is None:
        return
    if not isinstance(logs, Mapping):
        logs = {"extra_logs": str(type(logs))}  # nothing in it has a name: dropped, and counted once a sample
    for key, value in logs.items():
        values = _plain(value)
        if not isinstance(values, list | tuple) or len(values) != len(rows):
            values = [values] * len(rows)  # one number for all; a list of another length is dropped by each of them
        for row, entry in zip(rows, values, strict=True):
            _add_log(row, str(key), entry)


def _add_log(row: Row, key: str, value: Any) -> None:
    if value is None:
        return
    try:
        row.metrics[key] = _number(value)
    except _BadAnswerError:
        row.metrics[DROPPED_LOGS] = row.metrics.get(DROPPED_LOGS, 0.0) + 1


def _plain(value: Any) -> Any:
    """Lists and numbers out of arrays and tensors, without importing what made them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _number(value: Any) -> float:
    plain = _plain(value)
    if not isinstance(plain, int | float):
        raise _BadAnswerError(shown(value))
    try:
        return finite(plain)
    except ValueError as error:
        raise _BadAnswerError(str(error)) from None
