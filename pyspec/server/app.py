"""The endpoints."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack
from importlib import metadata
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from pyspec.errors import PyspecError
from pyspec.metrics import Statistics
from pyspec.output import Piece
from pyspec.server import pages
from pyspec.server.answers import Answer, ChatAnswer, CompletionAnswer
from pyspec.server.delivery import Delivery
from pyspec.server.errors import ApiError, as_api_error, from_validation
from pyspec.server.guard import Guard
from pyspec.server.monitoring import Monitoring
from pyspec.server.prepare import Plan, Preparer
from pyspec.server.scheduler import Scheduler
from pyspec.server.schemas import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Error,
    Health,
    ModelCard,
    ModelList,
)
from pyspec.server.settings import Settings

log = logging.getLogger("pyspec.server")

_Body = TypeVar("_Body", ChatRequest, CompletionRequest)

# Long prompts are tokenized beside the event loop, and no more at once than leaves cores to the models.
_MAX_PREPARING = 2
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request is refused."},
    "5XX": {"model": Error, "description": "It failed, or can be sent again in a moment."},
}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(scheduler: Scheduler, settings: Settings) -> ASGIApp:
    """The service as an ASGI application.

    Args:
        scheduler: Running, and running as long as the application.
        settings: Limits and names.
    """
    api = FastAPI(
        title="pyspec",
        version=metadata.version("pyspec"),
        description="OpenAI's API over speculative decoding on the CPU.",
        # FastAPI's own pages load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
    )
    api.include_router(_routes)
    monitoring = Monitoring(scheduler, frozenset(api.openapi()["paths"]))
    api.state.service = _Service(scheduler, settings, monitoring)
    api.state.chat_page = pages.chat_page()
    api.state.description_page = pages.description_page(api.openapi())
    api.add_exception_handler(HTTPException, _on_http_error)
    api.add_exception_handler(RequestValidationError, _on_invalid)
    api.add_exception_handler(ClientDisconnect, _on_disconnect)
    api.add_exception_handler(PyspecError, _on_error)
    # Starlette raises these again after the response, for the guard to log.
    api.add_exception_handler(Exception, _on_error)
    guarded = Guard(api, settings, monitoring)
    if not settings.origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=settings.origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
    )


async def _on_error(_request: Request, error: Exception) -> Response:
    return as_api_error(error).response()


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    # Nobody reads it; the number is what nginx logs.
    return Response(status_code=499)


async def _on_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.detail, status=error.status_code, headers=error.headers).response()


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return from_validation(error.errors(), error.body).response()


# ---- endpoints ---------------------------------------------------------------------------------------

_routes = APIRouter()


@_routes.get("/", include_in_schema=False)
async def _chat_page(request: Request) -> HTMLResponse:
    page: pages.Page = request.app.state.chat_page
    return page.response()


@_routes.get("/docs", include_in_schema=False)
async def _description_page(request: Request) -> HTMLResponse:
    page: pages.Page = request.app.state.description_page
    return page.response()


@_routes.get("/health", tags=["service"], response_model=Health)
async def _health(request: Request) -> Response:
    """Say whether the service takes requests; the status is 503 when it is about to end."""
    return JSONResponse(_service(request).health().model_dump())


@_routes.get("/metrics", tags=["service"], responses={200: {"content": {"text/plain": {}}}})
async def _metrics(request: Request) -> Response:
    """Give figures for Prometheus."""
    text = _service(request).monitoring.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@_routes.get("/v1/models", tags=["OpenAI"])
async def _models(request: Request) -> ModelList:
    """List the model that is served."""
    return ModelList(object="list", data=[_service(request).model_card()])


@_routes.get("/v1/models/{model}", tags=["OpenAI"])
async def _model(model: str, request: Request) -> ModelCard:
    """Describe the model of this name."""
    card = _service(request).model_card()
    if model != card.id:
        raise ApiError(
            f"no model is called {model!r} here: {card.id!r} is",
            status=404,
            param="model",
            code="model_not_found",
        )
    return card


@_routes.post(
    "/v1/chat/completions", tags=["OpenAI"], response_model=ChatCompletion, responses=_STREAMED
)
async def _chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request)
    return await service.answer(request, body, service.preparer.chat_plan, ChatAnswer)


@_routes.post("/v1/completions", tags=["OpenAI"], response_model=Completion, responses=_STREAMED)
async def _completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text as it stands."""
    service = _service(request)
    return await service.answer(request, body, service.preparer.completion_plan, CompletionAnswer)


# ---- what they share ---------------------------------------------------------------------------------


class _Service:
    """Answers requests with one scheduler."""

    def __init__(self, scheduler: Scheduler, settings: Settings, monitoring: Monitoring) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._limiter = anyio.CapacityLimiter(_MAX_PREPARING)
        self._created = int(time.time())
        self.monitoring = monitoring
        self.preparer = Preparer(scheduler.engine, settings)

    def health(self) -> Health:
        """The state of the scheduler."""
        scheduler = self._scheduler
        if scheduler.is_draining:
            raise ApiError("the service is shutting down", status=503, code="stopping")
        return Health(
            status="ok",
            model=self._settings.model,
            slots=scheduler.engine.parallel,
            running=scheduler.n_running,
            waiting=scheduler.n_waiting,
        )

    def model_card(self) -> ModelCard:
        """What is served."""
        engine = self._scheduler.engine
        return ModelCard(
            id=self._settings.model,
            object="model",
            created=self._created,
            owned_by="pyspec",
            context_length=engine.n_ctx,
            draft=None if engine.draft is None else engine.draft.path.stem,
        )

    async def answer(
        self,
        request: Request,
        body: _Body,
        prepare: Callable[[_Body], Plan],
        shape: Callable[..., Answer],
    ) -> Response:
        """Run what a request asks for.

        Args:
            request: Whose client is watched.
            body: What it asks for.
            prepare: Makes a plan of the body; it may take a while.
            shape: Makes the answer from the pieces.
        """
        if self._settings.log_prompts:
            log.info("%s", body.model_dump_json(exclude_unset=True))
        plan = await to_thread.run_sync(prepare, body, limiter=self._limiter)
        options = body.stream_options
        show_usage = bool(options and options.include_usage)
        engine = self._scheduler.engine
        answer = shape(engine.target, self._settings.model, plan, show_usage=show_usage)
        with ExitStack() as stack:
            delivery = stack.enter_context(Delivery(self._scheduler, plan, request))
            pieces = self._counted(delivery, request)
            # The status is not sent before the first pass, so that an error can still have its own.
            pieces = _preceded(await anext(pieces), pieces)
            if body.stream:
                chunks = _chunks(answer, pieces, show_usage=show_usage)
                return _EventStream(chunks, stack.pop_all().close)
            async for index, piece in pieces:
                answer.chunk(index, piece)
        return Response(answer.whole(), media_type="application/json")

    async def _counted(
        self, delivery: Delivery, request: Request
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces, counted as they pass."""
        finished = list[Statistics]()
        async for index, piece in delivery.pieces():
            self.monitoring.count_piece(piece)
            if piece.statistics is not None:
                finished.append(piece.statistics)
                request.scope["pyspec.summary"] = _summary(finished)
            yield index, piece


def _service(request: Request) -> _Service:
    service: _Service = request.app.state.service
    return service


def _summary(finished: list[Statistics]) -> str:
    """What the log says about answers."""
    n_prompt = sum(statistics.prompt_tokens for statistics in finished)
    n_written = sum(statistics.completion_tokens for statistics in finished)
    n_verified = sum(statistics.verified for statistics in finished)
    n_accepted = sum(statistics.accepted for statistics in finished)
    accepted = f", {n_accepted / n_verified:.0%} of drafts accepted" if n_verified else ""
    return f": {n_prompt} + {n_written} tokens{accepted}"


async def _preceded(
    first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncGenerator[tuple[int, Piece], None]:
    yield first
    async for item in rest:
        yield item


async def _chunks(
    answer: Answer, pieces: AsyncIterator[tuple[int, Piece]], *, show_usage: bool
) -> AsyncIterator[str]:
    """The texts of the events of a streamed answer."""
    for chunk in answer.beginning():
        yield chunk
    try:
        async for index, piece in pieces:
            # A round may leave nothing to show, as while a prompt is read.
            if piece.tokens or piece.statistics is not None:
                yield answer.chunk(index, piece)
    except ClientDisconnect:
        return
    except Exception as error:
        # The status has been sent: the error goes where OpenAI's clients look for it then.
        if not isinstance(error, PyspecError):
            log.exception("a request failed")
        yield json.dumps(as_api_error(error).body())
        return
    if show_usage:
        yield answer.usage_chunk()
    yield "[DONE]"


class _EventStream(Response):
    """Server-sent events, each sent at once.

    Args:
        texts: Of the events.
        close: Called at the end, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(self, texts: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._texts = texts
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the response."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._texts:
                event = f"data: {text}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
