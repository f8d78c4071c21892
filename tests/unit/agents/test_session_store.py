"""Keys, budgets and seeds of sessions."""

import pickle
from dataclasses import replace

import pytest

from rlhf_core.agents.sessions import CallRefusedError, Conversation, SessionStore, refusal
from rlhf_core.errors import GenerationError, WorkerError
from rlhf_core.records import ImageRef, SamplingParams, SessionRequest, StopReason, VersionSpan

pytestmark = pytest.mark.agents

REQUEST = SessionRequest("s", SamplingParams(max_tokens=8, seed=3), max_tokens=20, max_len=50, max_calls=4)


def opened(**changes):
    return SessionStore().open(replace(REQUEST, **changes))[0]


def said(call, count, reason=StopReason.EOS, choice=0):
    progress = call.progress(choice)
    progress.token_ids += range(count)
    progress.logprobs += [-1.0] * count
    call.finish(choice, reason, [VersionSpan(0, count, 1)] if count else [])


def test_a_key_opens_its_own_session_only() -> None:
    store = SessionStore()
    one, key = store.open(REQUEST)
    store.open(replace(REQUEST, session_id="other"))

    assert store.find(key) is one
    assert store.find(key, "s") is one
    for wrong in ((key, "other"), (key[:-1], None), ("", None)):
        with pytest.raises(CallRefusedError) as refused:
            store.find(*wrong)
        assert refused.value.status == 401


def test_a_closed_session_is_remembered_for_a_while(monkeypatch) -> None:
    monkeypatch.setattr("rlhf_core.agents.sessions.store.REMEMBERED_RECORDS", 2)
    store = SessionStore()
    keys = {}
    for name in "abc":
        _, keys[name] = store.open(replace(REQUEST, session_id=name))
        store.close(name)

    assert store.close("c") is store.close("c")
    with pytest.raises(WorkerError):
        store.close("a")
    with pytest.raises(CallRefusedError) as refused:
        store.find(keys["a"])
    assert refused.value.status == 409


def test_an_id_may_be_used_again_after_closing() -> None:
    store = SessionStore()
    store.open(REQUEST)
    with pytest.raises(GenerationError):
        store.open(REQUEST)
    first = store.close("s")
    store.open(REQUEST)

    assert store.close("s") is not first


def test_budgets() -> None:
    session = opened()
    first = session.begin()
    assert first.admit([1] * 10, 2) == 8  # of one call
    second = session.begin()
    with pytest.raises(CallRefusedError, match="in flight") as refused:
        second.admit([1], 5)  # 4 tokens left, none for each of 5
    assert refused.value.retry
    said(first, 8, StopReason.LENGTH)
    said(first, 2, choice=1)

    assert session.held == 0
    second.max_tokens = 3
    assert second.admit([1], 1) == 3
    said(second, 3)
    assert session.begin().admit([1] * 49, 1) == 1  # of the context
    assert [r.call for r in session.record().calls] == [0, 0, 1]


@pytest.mark.parametrize(("prompt", "clipped"), [(40, False), (45, True)])
def test_what_bounds_an_answer(prompt, clipped) -> None:
    call = opened().begin()
    call.admit([1] * prompt, 1)

    assert call.clipped is clipped


def test_more_answers_than_tokens_is_the_clients_mistake_not_the_sessions_end() -> None:
    session = opened()

    with pytest.raises(CallRefusedError, match="n is 21, and the session has 20 tokens left") as refused:
        session.begin().admit([1], 21)

    assert (refused.value.status, refused.value.limit) == (400, None)


def test_a_later_prompt_with_another_image_of_the_same_size_does_not_continue() -> None:
    session = opened()
    shown = [ImageRef(name * 64, f"images/{name}.png", 0, 2) for name in "aba"]
    continued = []
    for image, prompt in zip(shown, ([7, 7], [7, 7, 0, 1], [7, 7, 0, 1]), strict=True):
        call = session.begin()
        call.images = (image,)
        call.admit(prompt, 1)
        said(call, 1)
        continued.append(call.continued)

    assert continued == [False, False, True]


def test_a_session_that_is_closed_ends_its_calls() -> None:
    session = opened()
    call = session.begin()
    call.admit([1], 2)
    said(call, 3)
    session.close()
    said_late = call.progress(1)

    assert said_late is None
    assert [r.stop_reason for r in session.record().calls] == [StopReason.EOS, StopReason.ABORTED]
    for late in (call.check_open, session.begin):
        with pytest.raises(CallRefusedError) as refused:
            late()
        assert refused.value.status == 409


def test_a_later_prompt_continues_by_its_tokens() -> None:
    session = opened()
    first = session.begin()
    first.admit([5], 1)
    said(first, 2)  # 0, 1
    follow, other = session.begin(), session.begin()
    follow.admit([5, 0, 1, 7], 1)
    other.admit([5, 0, 2], 1)

    assert (first.continued, follow.continued, other.continued) == (False, True, False)


def test_the_longest_reply_is_found() -> None:
    session = opened()
    start = Conversation.of([{"role": "user", "content": "a"}])
    answer = {"role": "assistant", "content": "b"}
    call = session.begin()
    call.admit([5], 1)
    said(call, 2)
    call.remember(0, start.then([answer]))
    later = start.then([answer, {"role": "user", "content": "c"}])

    length, reply = session.longest(later)
    assert (length, reply.token_ids) == (2, (5, 0, 1))
    assert session.longest(start) is None


def test_a_lost_reply_is_not_continued() -> None:
    session = opened()
    start = Conversation.of([{"role": "user", "content": "a"}])
    call = session.begin()
    call.admit([5], 1)
    call.fail("died")
    call.remember(0, start)

    assert session.longest(start) is None
    assert session.record().calls[0].error == "died"


def test_seeds_differ_by_sample_call_and_wish() -> None:
    def seed(base, number, asked):
        call = opened(sampling=SamplingParams(max_tokens=8, seed=base)).begin()
        call.number = number
        return call.seed(asked)

    seeds = [seed(base, number, asked) for base in (1, 2) for number, asked in ((0, None), (1, None), (0, 7))]
    assert len(set(seeds)) == 6
    assert seed(1, 0, 7) == seed(1, 5, 7)
    assert seed(None, 0, 7) == 7
    assert seed(None, 0, None) is None
    assert all(0 <= value < 2**31 for value in seeds)


def test_a_refusal_travels() -> None:
    error = refusal.context_full(9, 8)

    again = pickle.loads(pickle.dumps(error))
    assert (again.status, again.code, str(again), again.limit) == (400, error.code, str(error), StopReason.CONTEXT_FULL)
