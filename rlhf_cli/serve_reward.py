"""``rlhf serve-reward MODEL``: a trained reward model behind HTTP, for many runs at once.

::

    POST /, /get_reward   {"query": [text, ...]}  ─▶  {"rewards": [number or null, ...]}      the JSON of OpenRLHF
    GET  /health          200 once the model is loaded
    GET  /metrics         for Prometheus

A text is prompt and answer, whole; ``prompts`` and ``labels`` are allowed and not looked at. Nothing is cut: a text that
is too long refuses its request (422). 503 says that the queue is full: ask again later, as ``reward.remote_url`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, Field, ValidationError

from rlhf_cli.reward_batches import Batcher, FullError
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.rewards.bearer import bearer_token
from rlhf_core.rewards.model_text import TokenReader, UnreadableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rlhf_core.config.model import RunConfig
    from rlhf_core.config.trained import DeepSpeedConfig
    from rlhf_core.rewards.model_text import RewardTokenizer

    Score = Callable[[Sequence[Sequence[int]]], list[float]]

MAX_BODY = 64 << 20  # bytes of a request
SHUTDOWN_SECONDS = 30  # for the requests under way
KEEPALIVE_SECONDS = 30  # longer than clients keep an idle connection, so that none is closed under a request
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True)
class Limits:
    """How requests are batched, and how many may wait."""

    max_batch: int = 32  # texts per batch
    max_wait: float = 0.005  # seconds that a batch waits for more
    max_queue: int = 4096  # texts that may wait


class _Query(BaseModel, strict=True):
    query: Annotated[list[str], Field(min_length=1)]


class _RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Metrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("rlhf_reward_requests", "Requests, by HTTP status.", ["status"], registry=registry)
        self.samples = Counter("rlhf_reward_samples", "Texts scored.", registry=registry)
        self.failures = Counter("rlhf_reward_failures", "Texts without a finite score.", registry=registry)
        self.latency = Histogram(
            "rlhf_reward_request_seconds", "Seconds of a request.", buckets=SECONDS, registry=registry
        )
        self.batch_rows = Histogram("rlhf_reward_batch_size", "Texts of a batch.", buckets=SIZES, registry=registry)
        self.batch_seconds = Histogram(
            "rlhf_reward_batch_seconds", "Seconds of the model.", buckets=SECONDS, registry=registry
        )
        self.depth = Gauge("rlhf_reward_queue_depth", "Texts that wait.", registry=registry)

    def batch(self, rows: int, seconds: float) -> None:
        """See ``Observer``."""
        self.batch_rows.observe(rows)
        self.batch_seconds.observe(seconds)


def make_app(score: Score, reader: TokenReader, *, limits: Limits, token: str | None = None) -> FastAPI:
    """The server around a model.

    Args:
        score: rows of token ids to one score each; blocks.
        reader: from text to token ids.
        limits: of batches and queue.
        token: what clients must send as bearer token; None: nothing.
    """
    metrics = Metrics()
    batcher = Batcher(
        score, max_batch=limits.max_batch, max_wait=limits.max_wait, max_queue=limits.max_queue, observer=metrics
    )
    metrics.depth.set_function(lambda: batcher.depth)
    service = _Service(batcher, reader, metrics, token)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with batcher:
            yield

    app = FastAPI(title="rlhf serve-reward", openapi_url=None, lifespan=lifespan)
    for path in ("/", "/get_reward"):
        app.post(path)(service.get_reward)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics)
    return app


class _Service:
    """The endpoints."""

    def __init__(self, batcher: Batcher, reader: TokenReader, metrics: Metrics, token: str | None) -> None:
        self._batcher = batcher
        self._reader = reader
        self._metrics = metrics
        self._token = token
        # One thread: a fast tokenizer must not be used by two at once, and long texts must not stop the event loop.
        self._tokenising = ThreadPoolExecutor(1, "tokens")

    async def get_reward(self, request: Request) -> JSONResponse:
        """Score the texts of a request."""
        started = time.monotonic()
        answer: dict[str, Any]
        try:
            self._authorise(request)
            status, answer = 200, {"rewards": await self._rewards(await _body(request))}
        except _RefusedError as error:
            status, answer = error.status, {"error": str(error)}
        self._metrics.requests.labels(status=str(status)).inc()
        self._metrics.latency.observe(time.monotonic() - started)
        return JSONResponse(answer, status)

    async def health(self) -> dict[str, str]:
        """The model is loaded: this process answers nothing before."""
        return {"status": "ok"}

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        try:
            self._authorise(request)
        except _RefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise _RefusedError(401, "this server wants a bearer token (its --token-env): set reward.remote_token_env")

    async def _rewards(self, body: bytes) -> list[float | None]:
        texts = _texts(body)
        if len(texts) > self._batcher.max_queue:
            raise _RefusedError(
                422, f"query: {len(texts)} texts, more than the queue holds ({self._batcher.max_queue})"
            )
        rows = await _in_thread(self._tokenising, self._read, texts)
        try:
            scores = await self._batcher.score(rows)
        except FullError:
            raise _RefusedError(503, f"the queue is full: {self._batcher.depth} texts wait; ask again later") from None
        except Exception as error:  # the model's: it is this request's answer, the server goes on
            self._metrics.failures.inc(len(rows))
            raise _RefusedError(500, f"the reward model raised {type(error).__name__}: {error}") from error
        self._metrics.samples.inc(len(scores))
        rewards = [score if math.isfinite(score) else None for score in scores]
        self._metrics.failures.inc(rewards.count(None))
        return rewards

    def _read(self, texts: Sequence[str]) -> list[Sequence[int]]:
        rows = []
        for index, text in enumerate(texts):
            try:
                rows.append(self._reader.read_text(text))
            except UnreadableError as error:
                raise _RefusedError(422, f"query[{index}]: {error}") from error
        return rows


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise _RefusedError(413, f"the request is longer than {MAX_BODY >> 20} MiB: send fewer texts")
    return bytes(body)


def _texts(body: bytes) -> list[str]:
    try:
        return _Query.model_validate(json.loads(body)).query
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        names = [f"[{part}]" if isinstance(part, int) else part for part in problem["loc"]]
        raise _RefusedError(422, f"{''.join(names) or 'the request'}: {problem['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise _RefusedError(422, f"the request is no JSON: {error}") from error


async def _in_thread(thread: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, call, *arguments)


# --- the process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model is served, and how it computes."""

    name: str  # as actor.model_name_or_path
    root: str | None = None  # storage.root of a run:ID
    device: Literal["auto", "cpu", "gpu"] = "auto"
    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    micro_batch_size: int = 8
    max_len: int | None = None  # tokens
    trust_remote_code: bool = False


def serve(
    model: ModelSettings,
    *,
    host: str,
    port: int,
    token_env: str | None,
    limits: Limits,
    announce: Callable[[str], None],
) -> None:
    """Load the model and answer requests until SIGTERM or Ctrl-C; those under way are finished.

    Args:
        model: what is served.
        host: an address of this machine.
        port: 0: any free one.
        token_env: the environment variable with the bearer token that clients must send.
        limits: of batches and queue.
        announce: is told the URL, once the model is loaded.

    Raises:
        ConfigError: the token is missing, or needed; there is no such model or tokenizer.
        TrainingError: it is no reward model.
        RlhfError: the address is taken.
    """
    import uvicorn

    token = _token(token_env, host)
    bound = _bind(host, port)  # first: a model takes minutes to load
    score, reader = _load(model)
    app = make_app(score, reader, limits=limits, token=token)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEPALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{bound.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[bound])


def _token(name: str | None, host: str) -> str | None:
    if name is None:
        if not _is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached by other machines: name the environment variable with a token in --token-env, "
                "or serve on 127.0.0.1"
            )
        return None
    return bearer_token(name, f"--token-env {name}")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may mean anything
        return False


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise RlhfError(
            f"cannot serve on {host}, port {port}: {error}; choose others with --host and --port"
        ) from error
    return bound


@dataclass(frozen=True, slots=True)
class _LoadSettings:
    """See ``training.model.LoadSettings``."""

    ds: DeepSpeedConfig
    run: RunConfig


def _load(settings: ModelSettings) -> tuple[Score, TokenReader]:
    import torch

    from rlhf_core.config.model import RunConfig, StorageConfig
    from rlhf_core.config.trained import DeepSpeedConfig
    from rlhf_core.data import load_tokenizer, pin, resolve_model
    from rlhf_core.training.reward_model import RewardModel

    storage = StorageConfig() if settings.root is None else StorageConfig(root=settings.root)
    path = resolve_model(pin(settings.name, storage))
    gpu = torch.cuda.is_available() if settings.device == "auto" else settings.device == "gpu"
    remote_code = settings.trust_remote_code
    model = RewardModel(
        _LoadSettings(DeepSpeedConfig(param_dtype=settings.param_dtype), RunConfig(trust_remote_code=remote_code)),
        path,
        device="cuda" if gpu else "cpu",
        micro_batch_size=settings.micro_batch_size,
        max_len=settings.max_len,
    )
    tokenizer = cast("RewardTokenizer", load_tokenizer(path, trust_remote_code=remote_code))
    return model.score, TokenReader(tokenizer, model.max_len, limit_name="--max-len")
