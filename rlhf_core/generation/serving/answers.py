"""Errors, in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import VLLMError

from rlhf_core.agents.sessions import CallRefusedError
from rlhf_core.errors import DeadlineError, RlhfError
from rlhf_core.telemetry import get_logger

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

logger = get_logger(__name__)

TYPES = {401: "authentication_error", 409: "conflict_error", 429: "rate_limit_error"}
# OpenAI's clients repeat a 409 or 429 by themselves, unless they are told not to.
NO_RETRY = {"x-should-retry": "false"}


def install(app: FastAPI) -> None:
    """Every error of a route becomes such an answer."""
    app.exception_handler(CallRefusedError)(_refused)
    app.exception_handler(RequestValidationError)(validation_exception_handler)
    app.exception_handler(HTTPException)(_http_error)
    for kind in (RlhfError, VLLMError, ValueError, TypeError, OverflowError, NotImplementedError, Exception):
        app.exception_handler(kind)(_failed)


def refusal_response(error: CallRefusedError) -> JSONResponse:
    """The answer to a call that is not made."""
    content = error_content(error.message, TYPES.get(error.status, "invalid_request_error"), error.code)
    return JSONResponse(content, error.status, headers=None if error.retry else NO_RETRY)


def error_content(message: str, kind: str, code: str | int) -> dict[str, Any]:
    """OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _refused(request: Request, error: CallRefusedError) -> JSONResponse:
    request.state.refusal = error
    return refusal_response(error)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    kind = TYPES.get(error.status_code, "invalid_request_error")
    return JSONResponse(error_content(str(error.detail), kind, error.status_code), error.status_code)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """vLLM decides what its own errors mean; ours are the engine's fault, never the client's."""
    if isinstance(error, RlhfError):
        logger.warning("a call failed: %s", error)
        status = 504 if isinstance(error, DeadlineError) else 503
        return JSONResponse(error_content(str(error), "server_error", "engine_error"), status)
    answer = create_error_response(error)
    headers = NO_RETRY if answer.error.code == 409 else None
    return JSONResponse(answer.model_dump(), answer.error.code, headers=headers)
