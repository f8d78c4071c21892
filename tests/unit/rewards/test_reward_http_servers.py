"""Which server is asked next, and when all of them are given up."""

from __future__ import annotations

import time

import pytest

from rlhf_core.rewards.http_servers import MAX_PAUSE, MAX_SILENCE, Servers, pause


async def asked(servers, tried=(), seconds=0.0):
    """The letter of the server that is taken and given back; None if there is none within the time."""
    server = await servers.take(tried, time.monotonic() + seconds)
    if server is None:
        return None
    servers.give_back(server)
    return server.url[-1]


def make(letters):
    servers = Servers([f"http://{letter}" for letter in letters])
    return servers, {server.url[-1]: server for server in servers._servers}


def fail(servers, server, started=None):
    servers.note_failure(server, time.monotonic() if started is None else started, "why")


async def test_each_in_turn():
    servers, _ = make("abc")

    assert [await asked(servers) for _ in range(7)] == list("abcabca")


async def test_a_request_tries_another_server_first():
    """a is next in turn, but this request has been there."""
    servers, named = make("ab")

    assert await asked(servers, {named["a"]}) == "b"
    assert await asked(servers, {named["a"], named["b"]}) == "a"


async def test_a_failed_server_is_avoided_then_asked_one_call_at_a_time():
    servers, named = make("ab")
    fail(servers, named["a"])
    assert [await asked(servers) for _ in range(3)] == list("bbb")

    named["a"].avoided_until = time.monotonic()  # its time is over
    look = await servers.take((), time.monotonic())
    assert look is named["a"]
    assert [await asked(servers) for _ in range(3)] == list("bbb")

    servers.note_answer(look)
    servers.give_back(look)
    assert sorted([await asked(servers) for _ in range(4)]) == list("aabb")


async def test_a_server_that_hung_is_avoided_for_as_long_as_that_took():
    servers, named = make("ab")

    fail(servers, named["a"], started=time.monotonic() - 60)

    assert named["a"].avoided_until == pytest.approx(time.monotonic() + 60, abs=1)
    assert named["a"].rests_until < time.monotonic() + 1


async def test_where_all_failed_the_first_that_has_rested_is_waited_for(monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.http_servers.FIRST_PAUSE", 0.1)
    servers, named = make("ab")
    for server in named.values():
        fail(servers, server, started=time.monotonic() - 60)

    assert await asked(servers) is None
    assert await asked(servers, seconds=2) in "ab"


async def test_a_call_that_fails_while_others_are_answered_says_nothing_about_the_server():
    servers, named = make("a")
    started = time.monotonic()

    servers.note_answer(named["a"])
    fail(servers, named["a"], started)

    assert await asked(servers) == "a"
    assert not servers.silent


async def test_calls_that_fail_together_are_one_failure():
    """64 calls refused at once: the server rests as after one, not for 2 ** 63 pauses."""
    servers, named = make("a")
    started = time.monotonic()

    for _ in range(64):
        fail(servers, named["a"], started)

    assert named["a"].failures == 1


async def test_all_are_given_up_after_failures_in_a_row_at_every_server():
    servers, named = make("ab")
    for _ in range(MAX_SILENCE):
        fail(servers, named["a"])
    assert not servers.silent  # b has not failed

    fail(servers, named["b"])
    assert servers.silent

    servers.note_answer(named["a"])
    assert not servers.silent


async def test_unlucky_samples_of_the_past_do_not_condemn_a_server():
    """Eight samples time out while the server answers others; then one more fails."""
    servers, named = make("a")
    started = time.monotonic()
    servers.note_answer(named["a"])
    for _ in range(MAX_SILENCE):
        fail(servers, named["a"], started)

    fail(servers, named["a"])

    assert not servers.silent


def test_pauses_grow_and_are_bounded_and_differ():
    assert [0.75 <= pause(n) / length <= 1.25 for n, length in ((1, 0.25), (2, 0.5), (3, 1.0), (5000, MAX_PAUSE))] == [
        True
    ] * 4
    assert len({pause(1) for _ in range(10)}) > 1
