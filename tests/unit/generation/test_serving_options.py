"""Every option of a request is right or refused; what is refused is no call, and says why."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from scripted_core import logprob
from serving_rig import until

from rlhf_core.agents.sessions import CallRefusedError
from rlhf_core.generation.serving.pictures import Pictures
from rlhf_core.generation.serving.recording import RecordingClient
from rlhf_core.records import Session, StopReason
from rlhf_core.vision.sources import ImageLimits

pytestmark = pytest.mark.agents

OUTSIDE = 999_999  # no id of the vocabulary


@pytest.mark.parametrize(
    "option",
    [
        {"logprobs": True, "top_logprobs": 10_000},
        {"logit_bias": {str(OUTSIDE): 1}},
        {"allowed_token_ids": [OUTSIDE]},
        {"stop_token_ids": [-1]},
        {"structured_outputs": {"regex": "("}},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}},
        {"vllm_xargs": {"a": 1}},
        {"logits_processors": ["x"]},
        {"guided_json": {"type": "object"}},
        {"functions": [{"name": "f"}]},
        {"mm_processor_kwargs": {"size": {"longest_edge": 28}}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"chat_template_kwargs": {"chat_template": "{{ messages }}"}},
        {"max_tokens": 0},
        {"n": 0},
        {"n": -1},
    ],
    ids=lambda option: next(iter(option)),
)
async def test_what_the_engine_would_not_take_is_refused_and_no_call(server, playing, option) -> None:
    async with playing(server) as play:
        with pytest.raises(openai.BadRequestError) as refused:
            await play.chat("a", extra_body=option)
        await play.chat("a")
        record = await play.close()

    assert refused.value.message
    assert [call.error for call in record.calls] == [None]
    assert record.refused_calls == 1


async def test_a_prompt_of_unknown_ids_is_no_call(server, playing) -> None:
    async with playing(server) as play:
        with pytest.raises(openai.BadRequestError, match="vocabulary"):
            await play.client.completions.create(model="policy", prompt=[97, OUTSIDE])
        record = await play.close()

    assert (record.calls, record.refused_calls) == ((), 1)


async def test_alternatives_are_shown_and_the_sampled_tokens_log_probs_recorded(rig, server, playing) -> None:
    rig.script([260, 261, 258])
    async with playing(server) as play:
        answer = await play.chat("a", logprobs=True, top_logprobs=5)
        record = await play.close()

    assert [len(place.top_logprobs) for place in answer.choices[0].logprobs.content] == [5, 5, 5]
    assert record.calls[0].logprobs == pytest.approx([logprob(token) for token in (260, 261, 258)])
    assert rig.core.requests[-1].sampling_params.temperature == 0.7


@pytest.mark.parametrize("kind", ["web_search", "code_interpreter"])
async def test_a_tool_that_nobody_runs_is_refused(server, playing, kind) -> None:
    tool = {"type": kind} | ({"container": {"type": "auto"}} if kind == "code_interpreter" else {})
    async with playing(server) as play:
        with pytest.raises(openai.BadRequestError, match=kind):
            await play.client.responses.create(model="policy", input="a", tools=[tool])


async def events_of(play, **options):
    stream = await play.client.responses.create(model="policy", input="a", stream=True, extra_body=options)
    return [event async for event in stream]


async def test_a_stream_of_responses_ends_with_its_error(server, playing) -> None:
    """The engine is asked when the answer has begun: too late for a status."""
    async with playing(server) as play:
        events = await events_of(play, logit_bias={str(OUTSIDE): 1})
        record = await play.close()

    assert (events[-1].type, events[-1].sequence_number) == ("error", len(events) - 1)
    assert "vocab" in events[-1].message
    assert (record.calls, record.refused_calls) == ((), 1)


async def test_two_streams_of_responses_that_meet_before_the_first_sampled(rig, server, playing, monkeypatch) -> None:
    """Both found their budget; the second one is told that the first one took it."""
    from rlhf_core.agents.sessions import Call

    admit, asked = Call.admit, []

    def first_alone(call, *args):
        asked.append(call)
        if len(asked) == 1:
            call.session._sampled = 400
        return admit(call, *args)

    monkeypatch.setattr(Call, "admit", first_alone)
    async with playing(server) as play:
        events = await events_of(play)
        record = await play.close()

    assert (events[-1].type, events[-1].code) == ("error", "max_tokens")
    assert (record.calls, record.refused_calls, record.limit) == ((), 1, StopReason.LENGTH)


async def test_a_session_that_is_closed_during_a_stream_of_responses(rig, server, playing) -> None:
    rig.core.pause_after = 0
    rig.core.running.clear()
    async with playing(server) as play:
        events = asyncio.create_task(events_of(play))
        await until(lambda: server._store.get(play.session.session_id).held)
        await asyncio.sleep(0.1)
        record = await play.close()

    assert "closed" in (await events)[-1].message
    assert [call.stop_reason for call in record.calls] == [StopReason.ABORTED]


async def test_a_request_that_is_too_large(server, playing, monkeypatch) -> None:
    monkeypatch.setattr("rlhf_core.generation.serving.access.MAX_BODY", 1000)
    async with playing(server) as play:
        with pytest.raises(openai.APIStatusError, match="at most") as refused:
            await play.chat("a" * 2000)
        record = await play.close()

    assert refused.value.status_code == 413
    assert (record.calls, record.refused_calls) == ((), 1)


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_call_that_is_cut_off_as_the_engine_takes_it_leaves_nothing(
    rig, server, playing, monkeypatch, choices
) -> None:
    taken, add = [], rig.core.add_request_async

    async def slow(request):
        taken.append(request.request_id)
        if len(taken) == choices:
            await asyncio.sleep(60)
        await add(request)

    monkeypatch.setattr(rig.core, "add_request_async", slow)
    rig.core.pause_after = 0
    rig.core.running.clear()
    async with playing(server) as play:
        call = asyncio.create_task(play.chat("a", n=choices))
        await until(lambda: len(taken) == choices)
        call.cancel()
        await until(lambda: not rig.engine.client.output_processor.request_states)
        await until(lambda: not rig.engine._gate.locked())


async def test_whoever_asks_for_rewards_of_closed_sessions_does_not_spin(server) -> None:
    start = time.monotonic()

    assert await server.rewards_posted(["gone"], 0.1) == []
    assert time.monotonic() - start >= 0.1


def test_a_key_is_no_word_for_logs() -> None:
    assert "secret" not in repr(Session("s", "http://h/v1", "secret"))


# --- images


class _Picture(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(self.wfile, "PNG")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def web():
    server = HTTPServer(("127.0.0.1", 0), _Picture)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _Picture.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}/x.png"
    server.shutdown()
    server.server_close()


def shown(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def pictures(**limits):
    return Pictures(SimpleNamespace(is_multimodal_model=True), lambda png: "images/a.png", ImageLimits(**limits))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"])
async def test_an_image_of_this_network_is_not_fetched(web, host) -> None:
    with pytest.raises(CallRefusedError, match=r"image_hosts|not known"):
        await pictures(private_hosts=()).take_in(shown(web.replace("127.0.0.1", host)))

    assert _Picture.asked == []


async def test_an_image_of_this_network_is_fetched_where_the_host_is_named(web) -> None:
    [picture] = await pictures(private_hosts=("127.0.0.1",)).take_in(shown(web))

    assert picture.uri == "images/a.png"
    assert _Picture.asked == ["/x.png"]


async def test_a_redirect_into_this_network_is_not_followed(monkeypatch) -> None:
    asked = []

    def answer(request):
        asked.append(request.url.host)
        return httpx.Response(302, headers={"location": "http://169.254.169.254/latest/meta-data"})

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(answer)))

    with pytest.raises(CallRefusedError, match=r"169\.254\.169\.254"):
        await pictures(private_hosts=()).take_in(shown("http://1.1.1.1/x.png"))

    assert asked == ["1.1.1.1"]


async def test_an_image_over_the_runs_limits_is_refused(web) -> None:
    with pytest.raises(CallRefusedError, match="image_max_pixels"):
        await pictures(max_pixels=4).take_in(shown(web))


def test_an_image_token_in_the_text_is_refused() -> None:
    image = SimpleNamespace(start=1, end=4)
    client = RecordingClient(SimpleNamespace(), (7,), image_token_id=7)

    client._check_image_tokens(SimpleNamespace(images=(image,)), [1, 7, 7, 7, 2])
    for images, prompt in (((image,), [1, 7, 7, 7, 7]), ((), [1, 7, 2])):
        with pytest.raises(CallRefusedError, match="image token"):
            client._check_image_tokens(SimpleNamespace(images=images), prompt)


async def test_json_that_is_no_json(server, playing) -> None:
    async with playing(server) as play:
        url = play.session.base_url + "/chat/completions"
        headers = {"authorization": f"Bearer {play.session.api_key}", "content-type": "application/json"}
        async with httpx.AsyncClient(trust_env=False) as client:
            for body in ("{", json.dumps([]), "[" * 100_000):
                assert 400 <= (await client.post(url, content=body, headers=headers)).status_code < 500
        record = await play.close()

    assert (record.calls, record.refused_calls) == ((), 3)


@pytest.mark.parametrize("choices", [1, 2])
async def test_tokens_are_named_only_for_a_client_that_asks(rig, server, playing, monkeypatch, choices) -> None:
    named = []
    monkeypatch.setattr(
        "vllm.v1.engine.logprobs.convert_ids_list_to_tokens",
        lambda tokenizer, ids: named.append(ids) or ["?"] * len(ids),
    )
    async with playing(server) as play:
        await play.chat("a", n=choices)
        assert named == []
        answer = await play.chat("a", logprobs=True)
        record = await play.close()

    assert len(named) == len(answer.choices[0].logprobs.content) == 3
    assert {call.logprobs for call in record.calls} == {record.calls[0].logprobs}
