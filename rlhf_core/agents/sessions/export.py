"""From the calls of a session to the rows that are trained.

A worked example. Call 0 has two choices; call 1 continues choice 0; call 2 has another history (compacted, say)::

    call 0.0   P0 | A          call 1   P0 A x | C         rows   P0 A x C     trained: A, C
    call 0.1   P0 | B          call 2   P2     | D                P0 B         trained: B
                                                                  P2 D         trained: D

The parent of a call is the earlier one whose prompt and completion are the longest exact prefix, token by token, of its
prompt, its images among them: two of one size have the same tokens. Each leaf of that tree is a row; each completion is
trained once, in the first row that holds it. Whatever the agent did with its history, a row is exactly what the engine saw.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.records import ActionRange, StopReason, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.records import CallRecord, ImageRef, SessionRecord


@dataclass(frozen=True, slots=True)
class SessionRow:
    """What one row of a session is made of. ``T`` = ``len(token_ids)``."""

    token_ids: tuple[int, ...]  # [T] prompt and completion of the last call, as the engine saw them
    action_ranges: tuple[ActionRange, ...]  # trained here
    logprobs: tuple[float, ...]  # [T] 0 outside ``action_ranges``
    version_spans: tuple[VersionSpan, ...]  # over ``action_ranges``
    images: tuple[ImageRef, ...]
    stop_reason: StopReason  # of the last call
    calls: tuple[tuple[int, int], ...]  # (call, choice), from the first to the last


def export_segments(record: SessionRecord, *, train_constrained: bool = False) -> list[SessionRow]:
    """The rows of a session, in the order of their last calls.

    Args:
        record: a closed session.
        train_constrained: train completions whose tokens something besides the policy chose.

    Returns:
        Rows in which nothing is trained are left out: there may be none.
    """
    calls = finished_calls(record)
    parents = parents_of(calls)
    inner = {parent for parent in parents if parent is not None}
    trained: set[int] = set()
    rows = []
    for leaf in range(len(calls)):
        if leaf in inner:
            continue
        path = _path(leaf, parents)
        fresh = [i for i in path if i not in trained and (train_constrained or not calls[i].constrained)]
        trained.update(fresh)
        if any(calls[i].token_ids for i in fresh):
            rows.append(_row([calls[i] for i in path], [calls[i] for i in fresh]))
    return rows


def finished_calls(record: SessionRecord) -> list[CallRecord]:
    """Without those that were aborted or failed: they are never trained, and nothing continues them."""
    return [call for call in record.calls if call.stop_reason not in (StopReason.ABORTED, StopReason.ERROR)]


def continued_share(record: SessionRecord) -> float:
    """Of the calls after the first: how many went on from an earlier one's own tokens. 1 if there is only one call."""
    kept = finished_calls(record)
    later = {call.call for call in kept} - {min((call.call for call in kept), default=0)}
    continued = {call.call for call in kept if call.continued}
    return len(continued & later) / len(later) if later else 1.0


def parents_of(calls: Sequence[CallRecord]) -> list[int | None]:
    """For each call the index of its parent; a call's parents come before it (``calls`` are in order).

    Where several are equally long, the last one: its answer is the one that the client saw last.
    """
    prompts = [array("i", call.prompt_token_ids).tobytes() for call in calls]
    told = [prompt + array("i", call.token_ids).tobytes() for prompt, call in zip(prompts, calls, strict=True)]
    parents: list[int | None] = []
    for index, call in enumerate(calls):
        best: int | None = None
        for other in range(index):
            # The choices of one call answer one prompt: none is another's parent.
            if calls[other].call == call.call or not prompts[index].startswith(told[other]):
                continue
            if not shows_first(call.images, calls[other].images):
                continue
            if best is None or len(told[other]) >= len(told[best]):
                best = other
        parents.append(best)
    return parents


def shows_first(images: Sequence[ImageRef], earlier: Sequence[ImageRef]) -> bool:
    """True if the first ones of ``images`` are the ``earlier`` ones."""
    return [(image.sha256, image.start) for image in images[: len(earlier)]] == [
        (image.sha256, image.start) for image in earlier
    ]


def _path(leaf: int, parents: Sequence[int | None]) -> list[int]:
    path = [leaf]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]


def _row(path: Sequence[CallRecord], trained: Sequence[CallRecord]) -> SessionRow:
    last = path[-1]
    token_ids = (*last.prompt_token_ids, *last.token_ids)
    logprobs = [0.0] * len(token_ids)
    ranges, spans = [], []
    for call in trained:
        if not call.token_ids:
            continue
        start = len(call.prompt_token_ids)
        end = start + len(call.token_ids)
        ranges.append(ActionRange(start, end))
        logprobs[start:end] = call.logprobs
        spans += [VersionSpan(start + span.start, start + span.end, span.version) for span in call.version_spans]
    return SessionRow(
        token_ids=token_ids,
        action_ranges=tuple(ranges),
        logprobs=tuple(logprobs),
        version_spans=tuple(spans),
        images=last.images,
        stop_reason=last.stop_reason,
        calls=tuple((call.call, call.choice) for call in path),
    )
