"""``rlhf serve-reward``: the server around a model, and the real process with our own client against it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification
from typer.testing import CliRunner

from rlhf_cli.main import app as cli
from rlhf_cli.serve_reward import Limits, make_app
from rlhf_core.errors import RlhfError
from rlhf_core.records import RewardRequest, RewardStatus
from rlhf_core.rewards.http_source import HttpSource
from rlhf_core.rewards.model_text import TokenReader


class Model:
    """Scores a row by its length; may wait, or raise over a token."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.batches = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, rows):
        self.go_on.wait(10)
        time.sleep(self.seconds)
        self.batches.append(len(rows))
        if any(ord("!") in row for row in rows):
            raise IndexError("index out of range")
        return [float("nan") if ord("?") in row else float(len(row)) for row in rows]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def serving(tokenizer):
    """A client of a server in this process; a text of n letters has n + 2 tokens, BOS and EOS."""

    @contextlib.asynccontextmanager
    async def open_server(model, *, max_len=20, token=None, **limits):
        app = make_app(
            model, TokenReader(tokenizer, max_len, limit_name="--max-len"), limits=Limits(**limits), token=token
        )
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client,
        ):
            yield client

    return open_server


def said(response):
    return response.status_code, response.json()


@pytest.mark.parametrize("path", ["/", "/get_reward"])
async def test_the_json_is_that_of_openrlhf(serving, path):
    async with serving(Model()) as client:
        body = {"query": ["abc", "a"], "prompts": ["a", ""], "labels": [None, {"x": 1}]}

        assert said(await client.post(path, json=body)) == (200, {"rewards": [5.0, 3.0]})


async def test_requests_that_come_together_are_scored_together(serving):
    model = Model()

    async with serving(model, max_batch=8, max_wait=0.3) as client:
        answers = await asyncio.gather(*(client.post("/", json={"query": ["a" * n]}) for n in range(1, 17)))

    assert [answer.json()["rewards"] for answer in answers] == [[n + 2.0] for n in range(1, 17)]
    assert model.batches == [8, 8]


async def test_a_lonely_request_does_not_wait_long(serving):
    async with serving(Model(), max_wait=0.01) as client:
        started = time.monotonic()
        await client.post("/", json={"query": ["a"]})

        assert time.monotonic() - started < 2


async def test_a_request_may_be_longer_than_a_batch(serving):
    model = Model()

    async with serving(model, max_batch=4) as client:
        answer = await client.post("/", json={"query": ["a"] * 10})

    assert answer.json() == {"rewards": [3.0] * 10}
    assert model.batches == [4, 4, 2]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "the request is no JSON"),
        (b"[" * 100_000, "the request is no JSON"),
        (b"[]", "the request: Input should be"),
        (b"{}", "query: Field required"),
        (b'{"query": []}', "query: List should have at least 1 item"),
        (b'{"query": "abc"}', "query: Input should be a valid list"),
        (b'{"query": ["a", 3]}', "query[1]: Input should be a valid string"),
        (b'{"query": ["a", null]}', "query[1]: Input should be a valid string"),
        (b'{"query": ["\\ud800"]}', "query[0]: the reward model's tokenizer cannot read the text"),
        (b'{"query": ["a", "aaaaaaaaaaaaaaaaaaaaaaa"]}', "query[1]: the sample has 25 tokens, more than --max-len=20"),
        (b'{"query": ["a", "a", "a", "a"]}', "query: 4 texts, more than the queue holds (3)"),
    ],
)
async def test_a_bad_request_is_refused_with_the_field(serving, content, named):
    model = Model()

    async with serving(model, max_queue=3) as client:
        answer = await client.post("/", content=content)

    assert answer.status_code == 422
    assert named in answer.json()["error"]
    assert model.batches == []


async def test_a_request_without_end_is_refused(serving, monkeypatch):
    monkeypatch.setattr("rlhf_cli.serve_reward.MAX_BODY", 1000)

    async with serving(Model()) as client:
        answer = await client.post("/", json={"query": ["a" * 2000]})

    assert answer.status_code == 413


async def test_a_full_queue_says_so_and_recovers(serving):
    """The model holds one text, two wait; the fourth is refused."""
    model = Model()
    model.go_on.clear()

    async with serving(model, max_batch=1, max_queue=2) as client:
        running = [asyncio.create_task(client.post("/", json={"query": ["a"]}))]
        await asyncio.sleep(0.1)
        running += [asyncio.create_task(client.post("/", json={"query": ["a"]})) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused = await client.post("/", json={"query": ["a"]})
        model.go_on.set()
        answers = await asyncio.gather(*running)

    assert said(refused) == (503, {"error": "the queue is full: 2 texts wait; ask again later"})
    assert [answer.status_code for answer in answers] == [200] * 3


async def test_a_text_that_breaks_the_model_does_not_spoil_its_batch(serving):
    async with serving(Model(), max_wait=0.2) as client:
        bad, good, odd = await asyncio.gather(*(client.post("/", json={"query": [text]}) for text in ("!", "a", "?")))

    assert said(bad) == (500, {"error": "the reward model raised IndexError: index out of range"})
    assert said(good) == (200, {"rewards": [3.0]})
    assert said(odd) == (200, {"rewards": [None]})  # JSON has no NaN, and a made-up number would be worse


async def test_the_token_is_asked_for_everywhere_but_health(serving):
    async with serving(Model(), token="hush") as client:
        right = {"Authorization": "Bearer hush"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "hush"}, {"Authorization": b"\xff"}):
            assert (await client.post("/", json={"query": ["a"]}, headers=headers)).status_code == 401
            assert (await client.get("/metrics", headers=headers)).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics", headers=right)).status_code == 200
        assert (await client.post("/", json={"query": ["a"]}, headers=right)).status_code == 200


async def test_the_metrics_count(serving):
    async with serving(Model(), max_batch=4) as client:
        await client.post("/", json={"query": ["a", "b", "?"]})
        await client.post("/", json={"query": ["!"]})
        await client.post("/", content=b"{")
        text = (await client.get("/metrics")).text

    for line in (
        'rlhf_reward_requests_total{status="200"} 1.0',
        'rlhf_reward_requests_total{status="500"} 1.0',
        'rlhf_reward_requests_total{status="422"} 1.0',
        "rlhf_reward_samples_total 3.0",
        "rlhf_reward_failures_total 2.0",
        'rlhf_reward_batch_size_bucket{le="4.0"} 2.0',
        "rlhf_reward_batch_size_sum 4.0",
        "rlhf_reward_request_seconds_count 3.0",
        "rlhf_reward_queue_depth 0.0",
    ):
        assert line in text.splitlines(), line


# --- what is refused before anything is loaded -----------------------------------------------------------------------


def refused(*arguments):
    with pytest.raises(RlhfError) as error:
        CliRunner().invoke(cli, ["serve-reward", "absent/model", *arguments], catch_exceptions=False)
    return str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_an_open_address_needs_a_token(host):
    assert f"--host {host} can be reached by other machines" in refused("--host", host)


def test_a_token_that_is_not_there(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)

    assert "--token-env NO_TOKEN: there is no such environment variable" in refused("--token-env", "NO_TOKEN")
    monkeypatch.setenv("NO_TOKEN", "smörgås")
    assert "is no printable ASCII text" in refused("--token-env", "NO_TOKEN")


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        error = refused("--port", str(port))

    assert f"cannot serve on 127.0.0.1, port {port}: " in error
    assert "--port" in error


# --- the real process ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, tokenizer, tiny_model):
    """The tiny model's backbone with a head of its own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward") / "model"
    model = LlamaForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def process(reward_model):
    """(process, URL)"""
    command = "import sys; from rlhf_cli.main import main; main()"
    arguments = ["serve-reward", reward_model, "--port", "0", "--token-env", "SERVE_TOKEN", "--max-batch", "16"]
    running = subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SERVE_TOKEN": "hush"},
    )
    line = running.stdout.readline()
    assert line.startswith(f"serving {reward_model} at http://127.0.0.1:"), line
    yield running, line.split(" at ")[1].strip()
    running.kill()
    running.wait(10)


def texts(count):
    answers = [f"answer {index} " * (index % 7) for index in range(count)]
    return [RewardRequest(f"Q: {a}", "Q: ", a, None, str(i), 0, "d") for i, a in enumerate(answers)]


async def test_our_client_gets_the_models_scores_alone_or_batched(process, reward_model, tokenizer):
    _, url = process
    samples = texts(40)
    reference = LlamaForSequenceClassification.from_pretrained(reward_model).eval()
    reader = TokenReader(tokenizer, 2048)
    with torch.no_grad():
        expected = [float(reference(torch.tensor([reader.read(sample)])).logits) for sample in samples]

    for batch_size, concurrency in ((1, 1), (1, 16), (8, 4)):
        source = HttpSource([url], token="hush", batch_size=batch_size, concurrency=concurrency)
        results = await source.score(samples)
        await source.close()

        assert [result.status for result in results] == [RewardStatus.OK] * 40
        assert [result.reward for result in results] == pytest.approx(expected, abs=1e-5)


async def test_a_sample_that_is_too_long_is_its_own_error(process):
    _, url = process
    long = RewardRequest("x" * 3000, "", "x" * 3000, None, "g", 0, "d")
    source = HttpSource([url], token="hush", batch_size=3)

    first, bad, last = await source.score([texts(1)[0], long, texts(1)[0]])
    await source.close()

    assert [first.status, bad.status, last.status] == [RewardStatus.OK, RewardStatus.ERROR, RewardStatus.OK]
    assert "422 Unprocessable" in bad.error
    assert "query[0]: the sample has 3002 tokens, more than --max-len=2048" in bad.error


async def test_a_wrong_token_is_every_samples_error(process):
    _, url = process
    source = HttpSource([url], token="wrong")

    (result,) = await source.score(texts(1))
    await source.close()

    assert "401 Unauthorized" in result.error
    assert "wrong" not in result.error


async def test_requests_under_way_are_finished_at_the_end(process):
    """The last test of the process: SIGTERM while 200 samples are on their way."""
    running, url = process
    source = HttpSource([url], token="hush", batch_size=50, concurrency=4)
    scoring = asyncio.create_task(source.score(texts(200)))
    while b"rlhf_reward_batch_size_count 0.0" in (await _metrics(url)):
        await asyncio.sleep(0.005)

    running.send_signal(signal.SIGTERM)
    results = await scoring
    await source.close()

    assert [result.status for result in results] == [RewardStatus.OK] * 200
    assert await asyncio.to_thread(running.wait, 20) in (0, -signal.SIGTERM)


async def _metrics(url):
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/metrics", headers={"Authorization": "Bearer hush"})).content
