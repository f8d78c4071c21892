"""The routes. vLLM's own handlers behind our sessions; nothing else of vLLM's API is served."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from rlhf_core.agents.sessions import CallRefusedError
from rlhf_core.agents.sessions.refusal import unknown_key
from rlhf_core.errors import WorkerError
from rlhf_core.generation.serving import answers
from rlhf_core.generation.serving.access import SessionAccess
from rlhf_core.generation.serving.pictures import Pictures
from rlhf_core.generation.serving.recorded import RecordedChat, RecordedCompletion, RecordedResponses
from rlhf_core.generation.serving.recording import RecordingClient
from rlhf_core.generation.serving.rendering import SplicingRenderer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_core.agents.sessions import LiveSession, SessionStore
    from rlhf_core.generation.serving.options import ServerOptions
    from rlhf_core.generation.serving.recording import ServedEngine

MODEL_NAME = "policy"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a reward is a finite number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


class RewardBody(BaseModel):
    """What is posted to a session. Posting again replaces the reward; ``done`` says that the episode is over."""

    model_config = ConfigDict(extra="forbid")

    reward: Finite | None = None
    score: Finite | None = None
    metrics: dict[str, Finite] = {}
    done: bool = False


def make_app(
    engine: ServedEngine, store: SessionStore, options: ServerOptions, store_image: Callable[[bytes], str] | None
) -> FastAPI:
    """The application: mount it with any ASGI server on the engine's event loop."""
    client = RecordingClient(engine, options.banned_ids, options.image_token_id)
    app = FastAPI(title="rlhf sessions", docs_url=None, redoc_url=None, openapi_url=None)
    pictures = Pictures(client.model_config, store_image, options.image_limits)
    _serve_with(app.state, client, engine, options, pictures)
    app.state.engine = engine
    app.state.args = Namespace(log_error_stack=False)  # vLLM's handler of malformed bodies looks at it
    for path, handler in (
        ("/v1/chat/completions", create_chat_completion),
        ("/v1/completions", create_completion),
        ("/v1/responses", create_responses),
    ):
        app.post(path, dependencies=[Depends(validate_json_request)], response_model=None)(handler)
    app.get("/v1/models")(_models)
    app.get("/health")(_health)
    app.post("/v1/sessions/{session_id}/reward")(_reward)
    answers.install(app)
    app.add_middleware(SessionAccess, store=store, abort=client.abort_call)
    return app


def _serve_with(
    state: Any, client: RecordingClient, engine: ServedEngine, options: ServerOptions, pictures: Pictures
) -> None:
    """vLLM's handlers look for their serving classes in the application's state."""
    parsers: dict[str, Any] = {
        "enable_auto_tools": options.tool_parser is not None,
        "tool_parser": options.tool_parser,
        "reasoning_parser": options.reasoning_parser or "",
    }
    template: dict[str, Any] = {
        "request_logger": None,
        "chat_template": options.chat_template,
        "chat_template_content_format": "auto",
    }
    renderer = SplicingRenderer(
        client.model_config,
        client.renderer,
        **template,
        **parsers,
        exact=options.history == "exact",
        eos_ids=engine.eos_ids,
        pictures=pictures,
    )
    models = _OneModel(client, [BaseModelPath(MODEL_NAME, options.model)])
    state.openai_serving_models = models
    state.openai_serving_chat = RecordedChat(
        client, models, "assistant", online_renderer=renderer, **template, **parsers
    )
    state.openai_serving_responses = RecordedResponses(client, models, renderer, **template, **parsers)
    state.openai_serving_completion = RecordedCompletion(client, models, online_renderer=renderer, request_logger=None)


class _OneModel(OpenAIServingModels):  # type: ignore[misc]  # vLLM has no types here
    """The policy, whatever an agent calls it: names of models stand in the code of agents."""

    def is_base_model(self, model_name: str) -> bool:
        """True."""
        return True


async def _models(request: Request) -> Any:
    listed = await request.app.state.openai_serving_models.show_available_models()
    return JSONResponse(listed.model_dump(exclude={"data": {"__all__": {"root"}}}))


async def _health(request: Request) -> JSONResponse:
    try:
        await request.app.state.engine.check_health()
    except WorkerError as error:
        return JSONResponse(answers.error_content(str(error), "server_error", "engine_error"), 503)
    return JSONResponse({"status": "ok"})


async def _reward(session_id: str, body: RewardBody, request: Request) -> JSONResponse:
    session: LiveSession = request.state.session
    if session_id != session.request.session_id:
        raise unknown_key()
    if session.closed:
        raise CallRefusedError(409, "session_closed", f"session {session_id!r} is closed")
    session.give(body.reward, body.score, body.metrics, done=body.done)
    return JSONResponse({"status": "ok"})
