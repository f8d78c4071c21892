"""Who may call, how much, and what a refusal says."""

import asyncio

import httpx
import openai
import pytest
from serving_rig import request_of, until

from rlhf_core.errors import ConfigError, GenerationError, WorkerError
from rlhf_core.records import StopReason

pytestmark = pytest.mark.agents


async def status_of(call) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    return refused.value.status_code, refused.value.body["code"]


async def post(play, path, json, key=None, **headers):
    base = play.session.base_url.removesuffix("/v1")
    headers = {"authorization": f"Bearer {key or play.session.api_key}", **headers}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(base + path, json=json, headers=headers)


BODY = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
CHAT = "/v1/chat/completions"


async def test_a_call_needs_the_key_of_an_open_session(server, playing) -> None:
    async with playing(server) as play:
        other = play.client.with_options(api_key="guessed")
        assert await status_of(other.models.list()) == (401, "invalid_api_key")
        assert (await post(play, CHAT, BODY, **{"x-session-id": "another"})).status_code == 401
        assert (await post(play, CHAT, BODY, **{"x-session-id": play.session.session_id})).status_code == 200
        assert (await post(play, CHAT, BODY, authorization="Basic abc")).status_code == 401
        await play.close()
        late = await post(play, CHAT, BODY)

    assert late.status_code == 409
    assert late.json()["error"]["code"] == "session_closed"
    assert late.headers["x-should-retry"] == "false"


async def test_health_needs_no_key_and_models_names_the_policy(server, playing) -> None:
    async with playing(server) as play:
        async with httpx.AsyncClient(trust_env=False) as client:
            health = await client.get(play.session.base_url.removesuffix("/v1") + "/health")
        models = await play.client.models.list()

    assert health.status_code == 200
    assert [model.id for model in models.data] == ["policy"]


async def test_the_tokens_of_a_session_run_out(rig, server, playing) -> None:
    rig.script([97] * 6, [97] * 9)
    async with playing(server, max_tokens=10) as play:
        await play.chat("a", max_tokens=6)
        second = await play.chat("b", max_tokens=100_000)
        refused = await status_of(play.chat("c"))
        record = await play.close()

    assert second.choices[0].finish_reason == "length"
    assert [len(call.token_ids) for call in record.calls] == [6, 4]
    assert [call.stop_reason for call in record.calls] == [StopReason.LENGTH, StopReason.LENGTH]
    assert refused == (429, "max_tokens")
    assert (record.refused_calls, record.limit) == (1, StopReason.LENGTH)


async def test_calls_in_flight_hold_their_tokens(rig, server, playing) -> None:
    rig.core.pause_after = 0
    rig.core.running.clear()
    async with playing(server, max_tokens=10) as play:
        first = asyncio.create_task(play.chat("a"))
        await until(lambda: server._store.get(play.session.session_id).held == 10)
        with pytest.raises(openai.RateLimitError, match="in flight") as refused:
            await play.chat("b")
        rig.core.running.set()
        await first
        assert refused.value.response.headers.get("x-should-retry") is None
        await play.chat("b")  # what was set aside and not used is free again


async def test_the_calls_of_a_session_run_out_and_refused_ones_count(server, playing) -> None:
    async with playing(server, max_calls=2) as play:
        await play.chat("a")
        assert (await post(play, CHAT, {"model": "policy"})).status_code == 400
        assert await status_of(play.chat("b")) == (429, "max_calls")
        record = await play.close()

    assert (len(record.calls), record.refused_calls, record.limit) == (1, 2, StopReason.MAX_TURNS)


async def test_a_context_that_is_full(rig, server, playing) -> None:
    rig.script([97] * 300)
    async with playing(server, max_len=60) as play:
        first = await play.chat("a" * 20)
        refused = await status_of(play.chat("a" * 60))
        longer = await status_of(play.chat("a" * 3000))  # than the engine's own context
        record = await play.close()

    assert first.choices[0].finish_reason == "length"
    [call] = record.calls
    assert len(call.prompt_token_ids) + len(call.token_ids) == 60
    assert call.stop_reason is StopReason.CONTEXT_FULL
    assert refused == (400, "context_length_exceeded")
    assert longer == refused
    assert (record.refused_calls, record.limit) == (2, StopReason.CONTEXT_FULL)


@pytest.mark.parametrize(
    "option",
    [
        {"use_beam_search": True},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": 5},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
        {"chat_template": "{{ messages }}"},
    ],
)
async def test_what_cannot_be_recorded_is_refused(server, playing, option) -> None:
    async with playing(server) as play:
        with pytest.raises(openai.BadRequestError):
            await play.chat("a", extra_body=option)
        record = await play.close()

    assert record.calls == ()
    assert record.refused_calls == 1


async def test_any_name_means_the_policy(server, playing) -> None:
    """Names of models stand in the code of agents."""
    async with playing(server) as play:
        answer = await play.client.chat.completions.create(model="gpt-4o", messages=BODY["messages"])

    assert answer.model == "policy"


async def test_a_reward_is_posted(server, playing) -> None:
    async with playing(server) as play:
        path = f"/v1/sessions/{play.session.session_id}/reward"
        assert not await server.reward_posted(play.session.session_id, 0.01)
        assert (await post(play, path, {"reward": 0.5})).status_code == 200
        assert not await server.reward_posted(play.session.session_id, 0.01)
        waiting = asyncio.create_task(server.rewards_posted([play.session.session_id, "unknown"], 5))
        body = {"reward": 1.0, "score": 0.9, "metrics": {"steps": 3}, "done": True}
        assert (await post(play, path, body)).status_code == 200
        assert await waiting == [play.session.session_id]
        record = await play.close()

    assert (record.reward, record.score, record.metrics) == (1.0, 0.9, {"steps": 3.0})


async def test_a_reward_that_is_none(server, playing) -> None:
    async with playing(server) as play:
        path = f"/v1/sessions/{play.session.session_id}/reward"
        base = play.session.base_url.removesuffix("/v1")
        headers = {"authorization": f"Bearer {play.session.api_key}", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False) as client:
            nan = await client.post(base + path, content='{"reward": NaN}', headers=headers)
        assert nan.status_code == 400
        assert (await post(play, path, {"rewrad": 1.0})).status_code == 400
        assert (await post(play, "/v1/sessions/other/reward", {"reward": 1.0})).status_code == 401
        record = await play.close()

    assert record.reward is None


async def test_closing_twice_gives_the_same_record(server, playing) -> None:
    async with playing(server) as play:
        await play.chat("a")
        record = await play.close()

        assert await play.close() is record
        with pytest.raises(WorkerError, match="restarted"):
            await server.close_session("never opened")


async def test_one_id_one_open_session(server) -> None:
    request = request_of()
    await server.open_session(request)
    with pytest.raises(GenerationError, match="open already"):
        await server.open_session(request)


async def test_a_host_that_is_not_ours(rig) -> None:
    async with rig.server(host="203.0.113.7") as server:
        with pytest.raises(ConfigError, match=r"agent\.server\.host"):
            await server.start()


async def test_agents_elsewhere_are_told_an_address(rig) -> None:
    async with rig.server(host="0.0.0.0", advertised_host="10.1.2.3") as server:
        assert (await server.start()).startswith("http://10.1.2.3:")
