"""From calls to rows: a hand-made table, and what holds whatever an agent does with its history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.agents.sessions import continued_share, export_segments
from rlhf_core.records import ActionRange, CallRecord, ImageRef, SessionRecord, StopReason, VersionSpan

pytestmark = pytest.mark.agents

LOST = (StopReason.ABORTED, StopReason.ERROR)


def call(number, prompt, said, choice=0, *, version=1, reason=StopReason.EOS, **more) -> CallRecord:
    spans = (VersionSpan(0, len(said), version),) if said else ()
    logprobs = tuple(-float(token) for token in said)
    return CallRecord(number, choice, tuple(prompt), tuple(said), logprobs, spans, reason, text=str(said), **more)


def record(*calls) -> SessionRecord:
    return SessionRecord("s", tuple(calls))


def trained(row):
    return [row.token_ids[start:end] for start, end in row.action_ranges]


def test_the_example_of_the_documentation() -> None:
    calls = (
        call(0, [1, 2], [10, 11]),
        call(0, [1, 2], [12], choice=1),
        call(1, [1, 2, 10, 11, 3], [13], version=2, reason=StopReason.LENGTH),
        call(2, [7], [14]),
    )

    rows = export_segments(record(*calls))

    assert [row.token_ids for row in rows] == [(1, 2, 12), (1, 2, 10, 11, 3, 13), (7, 14)]
    assert rows[1].action_ranges == (ActionRange(2, 4), ActionRange(5, 6))
    assert rows[1].logprobs == (0, 0, -10, -11, 0, -13)
    assert rows[1].version_spans == (VersionSpan(2, 4, 1), VersionSpan(5, 6, 2))
    assert rows[1].stop_reason is StopReason.LENGTH
    assert rows[1].calls == ((0, 0), (1, 0))


def test_a_shared_beginning_is_trained_once() -> None:
    calls = (call(0, [1], [10]), call(1, [1, 10, 2], [11]), call(2, [1, 10, 3], [12]))

    rows = export_segments(record(*calls))

    assert [trained(row) for row in rows] == [[(10,), (11,)], [(12,)]]
    assert rows[1].logprobs == (0, 0, 0, -12)


def test_of_two_equal_answers_the_later_one_is_continued() -> None:
    calls = (call(0, [1], [10]), call(1, [1], [10]), call(2, [1, 10, 2], [11]))

    rows = export_segments(record(*calls))

    assert [row.calls for row in rows] == [((0, 0),), ((1, 0), (2, 0))]


@pytest.mark.parametrize("reason", LOST)
def test_a_lost_call_is_neither_trained_nor_continued(reason) -> None:
    calls = (call(0, [1], [10]), call(1, [1, 10, 2], [11], reason=reason), call(2, [1, 10, 2, 11, 3], [12]))

    [row] = export_segments(record(*calls))

    assert trained(row) == [(10,), (12,)]
    assert row.token_ids == (1, 10, 2, 11, 3, 12)


def test_a_constrained_call_is_context() -> None:
    calls = (call(0, [1], [10], constrained=True), call(1, [1, 10, 2], [11]), call(2, [5], [12], constrained=True))

    assert [trained(row) for row in export_segments(record(*calls))] == [[(11,)]]
    assert [trained(row) for row in export_segments(record(*calls), train_constrained=True)] == [
        [(10,), (11,)],
        [(12,)],
    ]


def test_images_are_those_of_the_last_prompt() -> None:
    image = ImageRef("ab", "images/ab.png", 0, 1)
    calls = (call(0, [1], [10], images=(image,)), call(1, [1, 10, 2], [11], images=(image, image)))

    [row] = export_segments(record(*calls))

    assert row.images == (image, image)


def test_another_image_of_the_same_size_is_another_history() -> None:
    """An agent that shows the newest screenshot in place of the last one: the tokens are the same, what was seen is not."""
    first, second = (ImageRef(sha256=name * 64, uri=f"images/{name}.png", start=0, end=2) for name in "ab")
    calls = (call(0, [7, 7, 1], [10], images=(first,)), call(1, [7, 7, 1, 10, 2], [11], images=(second,)))

    rows = export_segments(record(*calls))

    assert [(row.images, trained(row)) for row in rows] == [((first,), [(10,)]), ((second,), [(11,)])]


def test_a_session_without_calls_has_no_rows() -> None:
    assert export_segments(record()) == []
    assert continued_share(record()) == 1.0


def test_the_share_of_calls_that_went_on() -> None:
    calls = (call(0, [1], [10]), call(1, [1, 10, 2], [11], continued=True), call(2, [5], [12]))

    assert continued_share(record(*calls)) == 0.5


@st.composite
def sessions(draw) -> SessionRecord:
    """Any agent: each call goes on from an earlier one, from a changed history, or from nothing."""
    token = st.integers(0, 3)  # few tokens: prefixes collide by chance, as they may
    calls: list[CallRecord] = []
    for number in range(draw(st.integers(0, 7))):
        prompt = draw(st.lists(token, min_size=1, max_size=4))
        if calls and draw(st.booleans()):
            parent = draw(st.sampled_from(calls))
            prompt = [*parent.prompt_token_ids, *parent.token_ids, *prompt]
        for choice in range(draw(st.integers(1, 2))):
            said = draw(st.lists(token, min_size=1, max_size=3))
            reason = draw(st.sampled_from([StopReason.EOS, StopReason.LENGTH, *LOST]))
            calls.append(
                call(number, prompt, said, choice, version=number, reason=reason, constrained=draw(st.booleans()))
            )
    return record(*calls)


@given(sessions(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_the_agent_does(session, train_constrained) -> None:
    rows = export_segments(session, train_constrained=train_constrained)

    by_name = {(c.call, c.choice): c for c in session.calls}
    kept = [c for c in session.calls if c.stop_reason not in LOST and (train_constrained or not c.constrained)]
    assert sum(end - start for row in rows for start, end in row.action_ranges) == sum(len(c.token_ids) for c in kept)
    seen = []
    for row in rows:
        path = [by_name[name] for name in row.calls]
        last = path[-1]
        assert row.token_ids == (*last.prompt_token_ids, *last.token_ids)
        assert len(row.logprobs) == len(row.token_ids)
        places = {len(c.prompt_token_ids): c for c in path}
        inside = set()
        for start, end in row.action_ranges:
            told = places[start]
            assert row.token_ids[start:end] == told.token_ids
            assert row.logprobs[start:end] == told.logprobs
            seen.append((told.call, told.choice))
            inside.update(range(start, end))
        assert all(value == 0 for place, value in enumerate(row.logprobs) if place not in inside)
        assert {p for span in row.version_spans for p in range(span.start, span.end)} == inside
    assert sorted(seen) == sorted((c.call, c.choice) for c in kept)  # each once
