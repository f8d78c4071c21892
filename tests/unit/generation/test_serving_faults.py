"""Clients that leave, engines that fail, sessions that end too early; and many at once."""

import asyncio
import gc
import socket
from contextlib import suppress

import openai
import pytest
from serving_rig import request_of, until

from rlhf_core.errors import GenerationError, WorkerError
from rlhf_core.records import StopReason

pytestmark = pytest.mark.agents


@pytest.fixture
def paused(rig):
    """Every request says two tokens, then waits."""
    rig.core.default = [260, 261, 262, 263, 258]
    rig.core.pause_after = 2
    rig.core.running.clear()
    yield rig.core
    rig.core.reset()
    rig.core.default = [104, 105, 258]


def live(server, play):
    return server._store.get(play.session.session_id)


async def test_a_client_that_leaves_a_stream(paused, server, playing) -> None:
    async with playing(server) as play:
        stream = await play.chat("a", stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await until(lambda: not live(server, play).open_calls)
        await until(lambda: paused.aborted)
        record, rows = await play.rows()

    [call] = record.calls
    assert call.stop_reason is StopReason.ABORTED
    assert call.token_ids == (260, 261)
    assert len(call.logprobs) == 2
    assert rows == []


async def test_a_client_that_leaves_a_plain_call(paused, server, playing) -> None:
    async with playing(server) as play:
        before = len(paused.aborted)
        with suppress(openai.APITimeoutError):
            await play.client.with_options(timeout=0.3).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "a"}]
            )
        await until(lambda: not live(server, play).open_calls)
        await until(lambda: len(paused.aborted) > before)
        record, rows = await play.rows()

    assert [call.stop_reason for call in record.calls] == [StopReason.ABORTED]
    assert rows == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_that_is_closed_during_a_call(paused, server, playing, stream) -> None:
    async with playing(server) as play:
        call = asyncio.create_task(play.streamed("a") if stream else play.chat("a"))
        await until(lambda: live(server, play).held)
        await asyncio.sleep(0.1)
        record = await play.close()
        with pytest.raises(openai.APIError, match="closed"):
            await call

    assert [call.stop_reason for call in record.calls] == [StopReason.ABORTED]


async def test_an_engine_that_refuses_a_request(rig, server, playing) -> None:
    rig.core.error = RuntimeError("out of blocks")
    async with playing(server) as play:
        with pytest.raises(openai.InternalServerError):
            await play.chat("a")
        rig.core.error = None
        await play.chat("b")
        record, rows = await play.rows()

    assert [call.stop_reason for call in record.calls] == [StopReason.ERROR, StopReason.EOS]
    assert "out of blocks" in record.calls[0].error
    assert [row.calls for row in rows] == [((1, 0),)]


async def test_requests_that_a_new_rollout_drops(rig, paused, server, playing) -> None:
    async with playing(server) as play:
        call = asyncio.create_task(play.chat("a"))
        await until(lambda: live(server, play).held)
        await asyncio.sleep(0.1)
        await rig.engine.drop_requests()
        with pytest.raises(openai.InternalServerError, match="dropped"):
            await call
        record = await play.close()

    assert [call.stop_reason for call in record.calls] == [StopReason.ERROR]


async def test_an_engine_with_damaged_weights_says_nothing(rig, server, playing, monkeypatch) -> None:
    async with playing(server) as play:
        monkeypatch.setattr(rig.engine, "_broken", "the weight update was cut off")
        with pytest.raises(openai.InternalServerError, match="cut off") as refused:
            await play.chat("a")
        with pytest.raises(WorkerError):
            await server.open_session(request_of())
        record = await play.close()

    assert refused.value.status_code == 503
    assert [call.stop_reason for call in record.calls] == [StopReason.ERROR]


async def test_a_call_waits_for_a_weight_update_and_a_closed_one_does_not_sample(rig, server, playing) -> None:
    async with playing(server) as play, playing(server) as other:
        asked = len(rig.core.requests)
        async with rig.engine._gate:
            waiting = asyncio.create_task(play.chat("a"))
            closed = asyncio.create_task(other.chat("a"))
            await until(lambda: live(server, play).held and live(server, other).held)
            record = await other.close()
        assert (await waiting).choices[0].message.content == "hi"
        with pytest.raises(openai.ConflictError):
            await closed

    assert [call.stop_reason for call in record.calls] == [StopReason.ABORTED]
    assert len(rig.core.requests) == asked + 1


async def test_a_missing_logprob_is_an_error_never_a_zero(rig, server, playing, monkeypatch) -> None:
    monkeypatch.setattr("scripted_core.logprob", lambda token: float("nan"))
    async with playing(server) as play:
        with pytest.raises(openai.InternalServerError):
            await play.chat("a")
        record = await play.close()

    assert "log-prob of token 0" in record.calls[0].error


async def test_nothing_is_sampled_without_a_session(rig, server) -> None:
    from rlhf_core.generation.serving.recording import RecordingClient

    with pytest.raises(GenerationError, match="without a session"):
        RecordingClient(rig.engine).generate({"prompt_token_ids": [1]}, None, "x")


async def test_many_sessions_at_once_lose_no_call(rig, server, playing) -> None:
    async def episode(number: int) -> int:
        async with playing(server) as play:
            messages = [{"role": "user", "content": str(number)}]
            for _ in range(2):
                answer = await play.chat(messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), messages[0]]
            record, [_row] = await play.rows()
            return len(record.calls)

    rig.core.default = [260, 261, 258]
    counts = await asyncio.gather(*(episode(number) for number in range(100)))

    assert counts == [2] * 100
    assert len(server._store) == 0


async def test_nothing_grows_with_the_sessions(rig, server, playing, monkeypatch) -> None:
    monkeypatch.setattr("rlhf_core.agents.sessions.store.REMEMBERED_RECORDS", 3)
    monkeypatch.setattr("rlhf_core.agents.sessions.store.REMEMBERED_KEYS", 5)
    from rlhf_core.agents.sessions import Call, LiveSession

    for _ in range(12):
        async with playing(server) as play:
            await play.chat("a")
    await until(lambda: not _alive(Call, LiveSession))

    assert (len(server._store._records), len(server._store._closed_keys)) == (3, 5)
    assert not rig.engine.client.output_processor.request_states


def _alive(*kinds) -> list:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, kinds)]


async def test_stopping_frees_the_port_and_ends_what_is_open(paused, rig) -> None:
    async with rig.server() as server:
        from serving_rig import Play

        play = Play(server, await server.open_session(request_of()))
        call = asyncio.create_task(play.chat("a"))
        await until(lambda: live(server, play).held)
    with pytest.raises(openai.APIError):
        await call

    port = int(play.session.base_url.split(":")[2].removesuffix("/v1"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
