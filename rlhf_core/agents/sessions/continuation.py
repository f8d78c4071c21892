"""A later prompt made of the tokens that were sampled, not of what a tokenizer makes of their text.

::

    stored     P R              prompt and reply, the engine's own ids
    rendered   P R' | bridge    what the template and the tokenizer make of the messages; R' need not be R
    prompt     P R  | bridge
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Span(NamedTuple):
    """Tokens [start, end) that stand for an image; its rendering has one token there."""

    start: int
    end: int


class Spliced(NamedTuple):
    """A prompt that continues a reply."""

    token_ids: list[int]
    spans: list[Span]  # of all its images


def splice(
    stored: Sequence[int],
    stored_spans: Sequence[Span],
    bridge: Sequence[int],
    rendered: Sequence[int],
    rendered_spans: Sequence[Span],
) -> Spliced | None:
    """The stored ids, continued by the bridge.

    Args:
        stored: prompt and reply.
        stored_spans: its images; the conversation's first ones.
        bridge: what follows the reply, one token an image.
        rendered: the whole conversation, images expanded.
        rendered_spans: all its images.

    Returns:
        None if the rendering does not end with the bridge: then the template writes the new messages in another way behind
        this history, and the bridge would be text that the model never sees elsewhere.
    """
    new = [Span(*span) for span in rendered_spans[len(stored_spans) :]]
    length = len(bridge) + sum(span.end - span.start - 1 for span in new)
    cut = len(rendered) - length
    if cut < 0 or any(span.start < cut for span in new):
        return None
    tail = list(rendered[cut:])
    if not _matches(tail, [Span(span.start - cut, span.end - cut) for span in new], bridge):
        return None
    move = len(stored) - cut
    spans = [*(Span(*span) for span in stored_spans), *(Span(s.start + move, s.end + move) for s in new)]
    return Spliced([*stored, *tail], spans)


def _matches(tail: Sequence[int], spans: Sequence[Span], bridge: Sequence[int]) -> bool:
    """True if ``tail`` is ``bridge`` with each image expanded."""
    done = place = 0
    for start, end in spans:
        step = start - done
        if list(tail[done:start]) != list(bridge[place : place + step]):
            return False
        done, place = end, place + step + 1
    return list(tail[done:]) == list(bridge[place:])
