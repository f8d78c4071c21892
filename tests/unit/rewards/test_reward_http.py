"""Reward servers: real ones, in threads, that answer, fail, hang and lie."""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import urlsplit

import pytest
from reward_rig import samples, source_of
from reward_stubs import DROP, HANG, Stub, free_url, half, serving

from rlhf_core.config.model import RewardConfig
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.records import RewardStatus
from rlhf_core.rewards import check_reward_config, make_reward_source

OK, ERROR, TIMED_OUT = RewardStatus.OK, RewardStatus.ERROR, RewardStatus.TIMED_OUT


def statuses(results):
    return [result.status for result in results]


def by_answer(**answers):
    """A script: per answer text what the server says to a call that holds it; otherwise 0.5 a sample."""

    def script(body):
        return next((answers[query[3:]] for query in body["query"] if query[3:] in answers), half(body))

    return script


def first_then(*first):
    """A script: these answers first, then well-behaved."""
    left = list(first)
    return lambda body: left.pop(0) if left else half(body)


# --- who is asked ----------------------------------------------------------------------------------------------------


async def test_three_servers_share_thirty_samples_evenly():
    """Issue 3 item 6, CASE 97."""
    stubs = [Stub(), Stub(), Stub()]

    with serving(*stubs) as urls:
        async with source_of(remote_url=urls) as source:
            results = await source.score(samples(["x"] * 30))

    assert statuses(results) == [OK] * 30
    assert [stub.sizes for stub in stubs] == [[1] * 10] * 3


async def test_one_of_three_down_and_all_are_scored_by_the_others():
    """Issue 3 item 6, CASE 97: 15/15."""
    stubs = [Stub(), Stub()]

    with serving(*stubs) as urls:
        async with source_of(remote_url=f"{urls},{free_url()}") as source:
            results = await source.score(samples(["x"] * 30))

    assert statuses(results) == [OK] * 30
    assert [len(stub.bodies) for stub in stubs] == [15, 15]


@pytest.mark.parametrize("bad", [(500, b"broken"), (503, b"full"), HANG, DROP], ids=["500", "503", "hangs", "drops"])
async def test_a_server_that_fails_is_avoided_and_its_share_goes_to_the_others(bad):
    stubs = [Stub(), Stub(), Stub(lambda body: bad)]

    with serving(*stubs) as urls:
        async with source_of(remote_url=urls, timeout=2, remote_concurrency=6) as source:
            results = await source.score(samples(["x"] * 90))

    assert statuses(results) == [OK] * 90
    assert sum(len(stub.bodies) for stub in stubs[:2]) == 90
    assert len(stubs[2].bodies) <= 7  # those that were under way when it failed first, and a later look at it


async def test_a_server_that_comes_back_is_used_again():
    first, second = Stub(), Stub(first_then((503, b"starting")), seconds=0.01)

    with serving(first, second) as urls:
        async with source_of(remote_url=urls, remote_concurrency=1) as source:
            await source.score(samples(["x"] * 4))
            await asyncio.sleep(0.4)
            await source.score(samples(["x"] * 10))

    assert len(second.bodies) == 6  # one refused, then its half


async def test_requests_under_way_are_limited():
    stub = Stub(seconds=0.005)

    with serving(stub) as url:
        async with source_of(remote_url=url, remote_concurrency=8, remote_batch_size=4) as source:
            results = await source.score(samples(["x"] * 1001))

    assert statuses(results) == [OK] * 1001
    assert sorted(stub.sizes) == [1, *[4] * 250]
    assert 1 < stub.most_at_once <= 8


async def test_a_slow_server_beside_a_fast_one():
    """Within the limit nothing is lost or asked twice."""
    stubs = [Stub(seconds=0.3), Stub()]

    with serving(*stubs) as urls:
        async with source_of(remote_url=urls, timeout=2) as source:
            results = await source.score(samples(["x"] * 20))

    assert statuses(results) == [OK] * 20
    assert [len(stub.bodies) for stub in stubs] == [10, 10]


# --- what is said ----------------------------------------------------------------------------------------------------


async def test_the_request_is_that_of_openrlhf():
    stub = Stub()

    with serving(stub) as url:
        async with source_of(remote_url=url, remote_batch_size=2) as source:
            await source.score(samples(["a", "b"], ["12", {"any": [1, None]}]))

    assert stub.bodies == [
        {"query": ["Q: a", "Q: b"], "prompts": ["Q: ", "Q: "], "labels": ["12", {"any": [1, None]}]},
    ]


@pytest.mark.parametrize("text", ["", "\0", "\ud800", "שלום", "e\u0301", "\U0001f9ea", "x" * 1_000_000])
async def test_odd_text_arrives_unaltered(text):
    stub = Stub()

    with serving(stub) as url:
        async with source_of(remote_url=url) as source:
            (result,) = await source.score(samples([text]))

    assert result.status is OK
    assert stub.bodies[0]["query"] == [f"Q: {text}"]


async def test_the_token_of_the_environment_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("MY_TOKEN", "hush-hush")
    stub = Stub(lambda body: (401, b"you sent Bearer hush-hush"))

    with serving(stub) as url, caplog.at_level(logging.DEBUG):
        async with source_of(remote_url=url, remote_token_env="MY_TOKEN") as source:
            (result,) = await source.score(samples(["x"]))

    assert stub.headers[0]["Authorization"] == "Bearer hush-hush"
    assert "401 Unauthorized: you sent Bearer ***" in result.error
    assert "hush" not in caplog.text


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_token_is_refused_at_the_start(monkeypatch, value):
    monkeypatch.delenv("MY_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_TOKEN", value)
    config = RewardConfig(remote_url="http://127.0.0.1:9", remote_token_env="MY_TOKEN")

    for start in (make_reward_source, check_reward_config):
        with pytest.raises(ConfigError, match=r"reward\.remote_token_env='MY_TOKEN': there is no such"):
            start(config)


async def test_the_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", free_url())
    monkeypatch.setenv("ALL_PROXY", free_url())

    with serving(Stub()) as url:
        async with source_of(remote_url=url) as source:
            assert statuses(await source.score(samples(["x"]))) == [OK]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_rewards_scores_and_logs():
    said = {"rewards": [1, 0.25], "scores": [True, 0], "extra_logs": {"length": [3, 4], "text": "no number"}}

    with serving(Stub(lambda body: said)) as url:
        async with source_of(remote_url=url, remote_batch_size=2) as source:
            first, second = await source.score(samples(["a", "b"]))

    assert (first.reward, first.score, second.reward, second.score) == (1.0, 1.0, 0.25, 0.0)
    assert first.metrics == {"reward/remote": 1.0, "length": 3.0, "dropped_logs": 1.0}


@pytest.mark.parametrize(
    ("said", "reward"),
    [([2], 2.0), ({"rewards": [True]}, 1.0), ({"rewards": 3}, 3.0), (4, 4.0), ({"rewards": [-0.0]}, 0)],
)
async def test_other_forms_of_one_reward(said, reward):
    with serving(Stub(lambda body: said)) as url:
        async with source_of(remote_url=url) as source:
            (result,) = await source.score(samples(["x"]))

    assert (result.status, result.reward) == (OK, reward)
    assert isinstance(result.reward, float)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ((200, b"<html>hi</html>"), "its answer '<html>hi</html>' is no JSON"),
        ((200, b""), "is no JSON"),
        ((200, b"\xff\xfe"), "is no JSON"),
        ((200, b"[" * 100_000), "is no JSON"),
        ((200, b'{"rewards": [NaN]}'), "the reward server answered nan for this sample"),
        ((200, b'{"rewards": [1e999]}'), "answered inf"),
        ({"rewards": [None]}, "answered None"),
        ({"rewards": ["1"]}, "answered the str '1'"),
        ({"rewards": []}, "answered 0 rewards for 1 samples"),
        (
            {"rewards": [1, 2]},
            "answered 2 rewards for 1 samples: answer a list of 1, or set reward.remote_batch_size=1",
        ),
        ({"reward": [1]}, "a dict without 'rewards'"),
        (None, "answered None as rewards"),
        ((200, b" " * (17 << 20)), "its answer is longer than 16 MiB"),
        ((302, b"", {"Location": "http://other/?key=hush"}), "302 Found to 'http://other/': name the final URL"),
        ((404, b"no such page"), "404 Not Found: no such page"),
        ((422, b"query[0] " + b"x" * 5000), "422 Unprocessable Entity: query[0] xxx"),
        ((429, b"slow down"), "429 Too Many Requests: slow down"),
    ],
)
async def test_what_cannot_be_used_is_a_typed_error_and_not_asked_again(said, named):
    stub, other = Stub(lambda body: said), Stub()

    with serving(stub, other) as urls:
        async with source_of(remote_url=urls) as source:
            (result,) = await source.score(samples(["x"]))

    assert (result.status, result.reward) == (ERROR, None)
    assert named in result.error
    assert len(result.error) < 600
    assert (len(stub.bodies), len(other.bodies)) == (1, 0)


async def test_one_bad_sample_does_not_spoil_its_request():
    """A server that refuses a whole request for one of four samples."""
    stub = Stub(by_answer(long=(422, b"too long")))

    with serving(stub) as url:
        async with source_of(remote_url=url, remote_batch_size=4) as source:
            results = await source.score(samples(["a", "b", "long", "c"]))

    assert statuses(results) == [OK, OK, ERROR, OK]
    assert stub.sizes == [4, 1, 1, 1, 1]


async def test_a_label_that_is_no_json_fails_its_own_sample():
    with serving(Stub()) as url:
        async with source_of(remote_url=url, remote_batch_size=3) as source:
            results = await source.score(samples(["a", "b", "c"], [1, object(), float("nan")]))

    assert statuses(results) == [OK, ERROR, ERROR]
    assert "cannot be sent as JSON" in results[1].error


# --- retries and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(500, b"oops"), (502, b"gateway"), (503, b"full"), DROP])
async def test_a_failure_that_passes_is_no_failure(bad):
    stub = Stub(first_then(bad, bad))

    with serving(stub) as url:
        async with source_of(remote_url=url) as source:
            (result,) = await source.score(samples(["x"]))

    assert (result.status, len(stub.bodies)) == (OK, 3)


async def test_a_server_that_starts_late_is_waited_for():
    url, stub = free_url(), Stub()

    async with source_of(remote_url=url, timeout=10) as source:
        running = asyncio.create_task(source.score(samples(["x"])))
        await asyncio.sleep(0.3)
        with stub.serving(port=urlsplit(url).port):
            assert statuses(await running) == [OK]


async def test_a_sample_that_breaks_the_server_is_given_up(monkeypatch):
    """500 for one sample, always; the others are scored. It is asked five times, not until the limit."""
    monkeypatch.setattr("rlhf_core.rewards.http_servers.FIRST_PAUSE", 0.01)
    stub = Stub(by_answer(bad=(500, b"index out of range")))

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=30) as source:
            results = await source.score(samples(["a", "bad", "b", "c"]))

    assert statuses(results) == [OK, ERROR, OK, OK]
    assert "500 Internal Server Error: index out of range" in results[1].error
    assert len(stub.bodies) == 3 + 5


async def test_one_item_that_sleeps_past_the_limit_is_timed_out_and_not_zero():
    """CASE 99."""
    stub = Stub(by_answer(sleep=HANG))

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=1.5) as source:
            results = await source.score(samples(["a", "sleep", "b"]))

    assert [(result.status, result.reward) for result in results] == [(OK, 0.5), (TIMED_OUT, None), (OK, 0.5)]
    assert f"{stub.url}: no answer within 1.5 s (reward.timeout)" in results[1].error


@pytest.mark.parametrize(("max_retries", "status", "calls"), [(0, TIMED_OUT, 1), (1, TIMED_OUT, 2), (2, OK, 3)])
async def test_time_outs_are_tried_again_as_often_as_asked(max_retries, status, calls, monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.http_servers.FIRST_PAUSE", 0.01)
    stub = Stub(first_then(HANG, HANG))

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=0.2, max_retries=max_retries) as source:
            (result,) = await source.score(samples(["x"]))

    assert (result.status, len(stub.bodies)) == (status, calls)


async def test_a_server_that_drips_is_timed_out(unused_tcp_port):
    """Headers at once, then one byte now and then: the limit is for the whole call."""

    async def drip(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.05)

    server = await asyncio.start_server(drip, "127.0.0.1", unused_tcp_port)
    async with server, source_of(remote_url=f"http://127.0.0.1:{unused_tcp_port}", timeout=0.3) as source:
        started = time.monotonic()
        (result,) = await source.score(samples(["x"]))
        assert time.monotonic() - started < 3

    assert result.status is TIMED_OUT


# --- nobody answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 300])
async def test_all_down_ends_within_the_limit_with_each_servers_error(count):
    """Issue 3 item 6."""
    urls = [free_url(), free_url(), free_url()]

    async with source_of(remote_url=",".join(urls), timeout=0.8) as source:
        started = time.monotonic()
        with pytest.raises(RewardError) as error:
            await source.score(samples(["x"] * count))

    assert 0.5 < time.monotonic() - started < max(3, 0.8 * count / 8)  # one after the other they take 0.8 s each
    assert all(f"{url}: no connection: " in str(error.value) for url in urls)
    assert "correct reward.remote_url" in str(error.value)


async def test_all_hang_and_the_stage_ends_after_a_few_limits():
    """CASE 40: every server accepts the connection and never answers."""
    stubs = [Stub(lambda body: HANG) for _ in range(3)]

    with serving(*stubs) as urls:
        async with source_of(remote_url=urls, timeout=0.5) as source:
            started = time.monotonic()
            with pytest.raises(RewardError) as error:
                await source.score(samples(["x"] * 1024))

    assert time.monotonic() - started < 4  # 1024 limits would be 512 s
    assert all(f"{stub.url}: no answer within 0.5 s" in str(error.value) for stub in stubs)


async def test_servers_that_never_accept_end_too():
    """A full backlog: the connection itself hangs."""
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        held = [socket.socket() for _ in range(8)]
        for client in held:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        async with source_of(remote_url=f"http://127.0.0.1:{full.getsockname()[1]}", timeout=0.4) as source:
            started = time.monotonic()
            with pytest.raises(RewardError, match="no answer within"):
                await source.score(samples(["x"] * 200))
            assert time.monotonic() - started < 4
        for client in held:
            client.close()


async def test_all_broken_is_an_error_of_the_source(monkeypatch):
    monkeypatch.setattr("rlhf_core.rewards.http_servers.FIRST_PAUSE", 0.01)
    stubs = [Stub(lambda body: (500, b"no model")), Stub(lambda body: DROP)]

    with serving(*stubs) as urls:
        async with source_of(remote_url=urls, timeout=2) as source:
            with pytest.raises(RewardError) as error:
                await source.score(samples(["x"] * 50))

    assert f"{stubs[0].url}: 500 Internal Server Error: no model" in str(error.value)
    assert f"{stubs[1].url}: the connection broke" in str(error.value)


@pytest.mark.parametrize("concurrency", [1, 20])
async def test_servers_that_die_half_way_stop_the_run(concurrency):
    """Ten of 20 samples are scored, then the server is gone: better to stop than to train on a part."""
    stub = Stub()
    stub.script = lambda body: half(body) if len(stub.bodies) <= 10 else (503, b"shutting down")

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=1.5, remote_concurrency=concurrency) as source:
            with pytest.raises(RewardError, match="503 Service Unavailable: shutting down"):
                await source.score(samples(["x"] * 20))

    assert len(stub.bodies) > 10


async def test_a_server_that_is_only_busy_is_not_lost():
    """It takes four requests at once and refuses the others: all are scored in the end."""
    stub = Stub(seconds=0.02)
    stub.script = lambda body: half(body) if stub.at_once <= 4 else (503, b"full")

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=20, remote_concurrency=16) as source:
            results = await source.score(samples(["x"] * 60))

    assert statuses(results) == [OK] * 60


async def test_a_few_unlucky_samples_do_not_condemn_a_server():
    """Four of 100 hang, and are the last: the server works."""
    stub = Stub(by_answer(hang=HANG))

    with serving(stub) as url:
        async with source_of(remote_url=url, timeout=2, remote_concurrency=16) as source:
            results = await source.score(samples(["x"] * 96 + ["hang"] * 4))

    assert statuses(results) == [OK] * 96 + [TIMED_OUT] * 4


# --- at the start ----------------------------------------------------------------------------------------------------


def test_servers_that_are_all_down_are_refused_at_the_start():
    urls = [free_url(), "http://no-such-host.invalid:80/x?api=1"]

    with pytest.raises(ConfigError) as error:
        check_reward_config(RewardConfig(remote_url=tuple(urls)))

    assert f"{urls[0]}: [Errno 111] Connection refused" in str(error.value)
    assert "http://no-such-host.invalid:80/x: " in str(error.value)


def test_one_server_that_is_down_is_a_warning(caplog):
    down = free_url()

    with serving(Stub()) as up, caplog.at_level(logging.WARNING, logger="rlhf"):
        check_reward_config(RewardConfig(remote_url=f"{up},{down}"))

    assert down in caplog.text
    assert up not in caplog.text


def test_the_check_sends_no_request():
    stub = Stub()

    with serving(stub) as url:
        check_reward_config(RewardConfig(remote_url=url))

    assert stub.bodies == []


# --- combined --------------------------------------------------------------------------------------------------------


async def test_functions_and_servers_add_up():
    with serving(Stub()) as url:
        config = {"functions": [{"use": "digits", "weight": 2}], "remote_url": url, "remote_weight": 0.1}
        async with source_of(**config) as source:
            (result,) = await source.score(samples(["1a"]))

    assert result.reward == pytest.approx(2 * 0.5 + 0.1 * 0.5)
    assert result.metrics == {"reward/digits": 0.5, "reward/remote": 0.5}


async def test_no_samples_no_calls():
    async with source_of(remote_url=free_url()) as source:
        assert await source.score([]) == []
