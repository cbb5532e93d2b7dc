"""The app: routes of the API over one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

import foredraft
from foredraft.errors import shortened
from foredraft.serve.bodies import SHAPES, SHORT, BoundedBodies, KnownOrigins, answer, is_local, json_object
from foredraft.serve.completions import ChatReply, CompletionReply
from foredraft.serve.generations import Generation, Model
from foredraft.serve.limits import client_of
from foredraft.serve.logs import Recording, current
from foredraft.serve.offload import in_thread, offloaded
from foredraft.serve.openapi import add_page, capabilities, card, document
from foredraft.serve.problems import Problem, forget_frames
from foredraft.serve.replies import Event, Reply
from foredraft.serve.requests import as_problems, check_model
from foredraft.serve.settings import Settings
from foredraft.serve.state import App, Loader
from foredraft.serve.streaming import (
    SSE_HEADERS,
    Socket,
    encoded,
    opened,
    plain_text,
    prefers_text,
    server_sent,
)
from foredraft.serve.tokens import READERS, Reader, tokenizer_info

logger = logging.getLogger(__name__)
LONGEST, MOST_NAMES = 100, 20  # characters of a name in a header, and names
T = TypeVar("T")


def create_app(load: Loader, settings: Settings, *, local: bool | None = None) -> FastAPI:
    """Return the app; `app.state.foredraft` is its state."""
    state = App(load, settings)
    local = is_local(settings.host) if local is None else local
    app = FastAPI(
        title="Foredraft", version=foredraft.__version__, lifespan=state.lifespan,
        description="An OpenAI-compatible API with lossless speculative decoding.",
        docs_url=None, redoc_url=None, openapi_url=None,
    )  # fmt: skip
    app.state.foredraft = state
    app.add_middleware(BoundedBodies, most=lambda: state.most_body, all_=state.bodies)
    app.add_middleware(KnownOrigins, known=settings.cors, local=local)
    if settings.cors:
        from fastapi.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(Recording, end=state.end)  # the last one added sees a request first
    for error in (Problem, ClientDisconnect, Exception, 404, 405):
        app.add_exception_handler(error, _answer_error)
    _add_health(app, state)
    _add_models(app, state)
    for path, reader in READERS.items():
        _add_reader(app, state, path, reader)
    for path, shape in SHAPES.items():
        _add_shape(app, state, path, shape)
    _add_socket(app, state)
    add_page(app)
    return app


def _add_health(app: FastAPI, state: App) -> None:
    @app.get("/health")
    async def health() -> Response:
        if state.failed is not None:
            raise Problem(503, "the model could not be loaded", code="failed")
        if state.model is None:
            raise Problem(503, "the model is being loaded", code="loading")
        if state.draining:
            raise Problem(503, "the server is shutting down", code="draining")
        return JSONResponse({"status": "ok"})

    app.get("/ready")(health)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        state.keys.check(request.headers.get("authorization"))
        return PlainTextResponse(state.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": foredraft.__version__}

    made = cache(lambda: document(app, keys=bool(state.keys)))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        state.keys.check(request.headers.get("authorization"))
        return JSONResponse(made())


def _add_models(app: FastAPI, state: App) -> None:
    def ready(request: Request) -> Model:
        _check_key(state, request, either=True)  # clients of either API ask for the models
        return state.ready()

    def add(path: str, name: str, show: Callable[[Model], dict[str, Any]]) -> None:
        @app.get(path, name=name)
        async def shown(request: Request) -> Response:
            return JSONResponse(show(ready(request)))

    add("/v1/models", "models", lambda model: {"object": "list", "data": [card(model, model.names[0])]})
    add("/tokenizer_info", "tokenizer_info", tokenizer_info)
    add("/v1/capabilities", "capabilities", capabilities)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        model = ready(request)
        check_model(name, model.names)
        return JSONResponse(card(model, name))


def _add_reader(app: FastAPI, state: App, path: str, reader: Reader) -> None:
    @app.post(path, name=reader.name)
    async def read(request: Request) -> Response:
        _check_key(state, request, either=reader.either)
        model = state.ready()
        body = await _body(request, state)
        given = await offloaded(current().size, reader.request.chat_of, body)
        permit = model.limits.take(1, client_of(current().key, current().address))
        try:
            with as_problems():
                reading = in_thread(current().size, reader.answer, given, model)
                found, notes = await _while_there(request, reading)
        finally:
            permit.free()
        return Response(found, media_type="application/json", headers=_listed(notes))


def _add_shape(app: FastAPI, state: App, path: str, shape: type[Reply]) -> None:
    @app.post(path, name=shape.route)
    async def generate(request: Request) -> Response:
        _check_key(state, request, either=shape.own_headers)
        body = await _body(request, state)
        reply = await _while_there(request, state.start(shape, body))
        model = state.ready()
        headers = ({"request-id": reply.id} if shape.own_headers else {}) | _listed(reply.job.notes)
        if not reply.job.request.stream:
            try:
                whole = await _while_there(request, reply.finish())
            finally:
                model.end(reply.generation)
            return JSONResponse(whole, headers=headers | _listed({"x-broken-keywords": reply.broken()}))
        events, kind = reply.events(state.settings.heartbeat_seconds), "text/event-stream"
        if shape.done and prefers_text(request.headers.get("accept", "")):
            content, kind = encoded(events, plain_text), "text/plain; charset=utf-8"
        else:
            content, headers = encoded(events, server_sent, shape.done), headers | SSE_HEADERS
        stream = _GenerationStream(content, headers=headers, media_type=kind)
        stream.model, stream.generation = model, reply.generation
        return stream

    for short in (each for each, long in SHORT.items() if long == path):
        app.post(short, include_in_schema=False)(generate)


def _add_socket(app: FastAPI, state: App) -> None:
    @app.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        if not await opened(socket, state.keys):
            return

        async def run(frame: dict[str, Any], send: Callable[[Event], Awaitable[None]]) -> None:
            shape = ChatReply if "messages" in frame else CompletionReply
            reply = await state.start(shape, {**frame, "stream": True})
            with state.ready().read(reply.generation):
                async for each in reply.events(None):
                    if each is not None:
                        await send(each)

        await Socket(socket, run, state.most_body, state.end, state.bodies).serve()


def _check_key(state: App, request: Request, *, either: bool) -> None:
    """Check a request's key; `either`: it may come in the header of Anthropic's API, too."""
    own = request.headers.get("x-api-key") if either else None
    state.keys.check(request.headers.get("authorization"), own)


async def _body(request: Request, state: App) -> dict[str, Any]:
    data = await request.body()
    return await _while_there(request, offloaded(len(data), json_object, data, state.most_body))


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns; a client that leaves cancels it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Problem(499, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _listed(notes: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return headers that list some of their names, each printable and short; none for no names."""
    headers = {}
    for header, names in notes.items():
        shown = [
            repr(name[:LONGEST])[1:-1].encode("ascii", "backslashreplace").decode()
            for name in names[:MOST_NAMES]
        ]
        if len(names) > MOST_NAMES:
            shown.append(f"and {len(names) - MOST_NAMES} more")
        if shown:
            headers[header] = ", ".join(shown)
    return headers


class HeadAsGet:
    """Answers HEAD as GET; the server leaves the body out (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


class _GenerationStream(StreamingResponse):
    """A stream whose generation ends with it, even where it never began."""

    model: Model
    generation: Generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self.model.read(self.generation):
                await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            if not self.generation.dropped:
                raise


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer what a route raised, or a path or method that has none."""
    if isinstance(error, ClientDisconnect):  # while it was sending the body, which is no error of the server
        return Response(status_code=499)
    if isinstance(error, Problem):
        problem = error
        forget_frames(problem)
    elif isinstance(error, HTTPException) and error.status_code == 404:
        problem = Problem(404, f"there is no {shortened(request.url.path)}", code="not_found")
    elif isinstance(error, HTTPException):
        message = f"{request.method} is not allowed here"
        problem = Problem(405, message, code="method_not_allowed", headers=cast(Any, error.headers))
    else:
        logger.exception("a request failed by a defect of the server", exc_info=error)
        problem = Problem(500, "the server failed; its log has the reason", code="internal_error")
        problem.headers["x-request-id"] = current().id  # this answer does not pass `Recording`
    return answer(problem, request.url.path)
