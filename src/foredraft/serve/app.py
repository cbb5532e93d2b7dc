"""The app: routes of the API over one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

import foredraft
from foredraft.errors import shortened
from foredraft.serve.bodies import (
    SHAPES,
    SHORT,
    BoundedBodies,
    KnownOrigins,
    answer,
    is_local,
    json_object,
    opened,
)
from foredraft.serve.completions import ChatReply, CompletionReply
from foredraft.serve.generations import Generations
from foredraft.serve.limits import Client
from foredraft.serve.logs import Recording, current
from foredraft.serve.offload import in_thread, offloaded
from foredraft.serve.openapi import ModelList, add_page, capabilities, card, document
from foredraft.serve.problems import Problem, as_problems, forget_frames
from foredraft.serve.replies import Event, Reply
from foredraft.serve.requests import Job, check_model
from foredraft.serve.settings import Settings
from foredraft.serve.state import App, Loader, Model
from foredraft.serve.streaming import SSE_HEADERS, Socket, plain_text, server_sent
from foredraft.serve.tokens import COUNTERS, Counter, DetokenizeRequest, TokenizeRequest, tokenizer_info

logger = logging.getLogger(__name__)
LONGEST = 100  # characters of a name in a header
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
    app.add_middleware(Recording, end=state.end)  # the last one added sees a request first
    app.add_exception_handler(Problem, cast(Any, _answer_problem))
    app.add_exception_handler(ClientDisconnect, _end_abandoned)
    app.add_exception_handler(Exception, cast(Any, _answer_bug))
    app.add_exception_handler(404, cast(Any, _answer_status))
    app.add_exception_handler(405, cast(Any, _answer_status))
    _add_health(app, state)
    _add_models(app, state)
    _add_tokens(app, state, "/tokenize", TokenizeRequest)
    _add_tokens(app, state, "/detokenize", DetokenizeRequest)
    for path, shape in SHAPES.items():
        _add_shape(app, state, path, shape)
    for path, counter in COUNTERS.items():
        _add_counter(app, state, path, counter)
    _add_socket(app, state)
    _add_document(app, state)
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
        update = state.model.update_gauges if state.model is not None else lambda: None
        return PlainTextResponse(state.metrics.text(update), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": foredraft.__version__}


def _add_models(app: FastAPI, state: App) -> None:
    def ready(request: Request) -> Model:
        # clients of either API ask for the models
        state.keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))
        return state.ready()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        model = ready(request)
        found: ModelList = {"object": "list", "data": [card(model, model.names[0])]}
        return JSONResponse(found)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        model = ready(request)
        check_model(name, model.names)
        return JSONResponse(card(model, name))

    @app.get("/tokenizer_info", name="tokenizer_info")
    async def shown_tokenizer(request: Request) -> Response:
        return JSONResponse(tokenizer_info(ready(request)))

    @app.get("/v1/capabilities", name="capabilities")
    async def shown_capabilities(request: Request) -> Response:
        return JSONResponse(capabilities(ready(request)))


def _add_tokens(
    app: FastAPI, state: App, path: str, kind: type[TokenizeRequest] | type[DetokenizeRequest]
) -> None:
    @app.post(path, name=path[1:])
    async def answer_tokens(request: Request) -> Response:
        key = state.keys.check(request.headers.get("authorization"))
        model = state.ready()
        body = await _body(request, state)
        given: TokenizeRequest | DetokenizeRequest = await offloaded(current().size, kind.read, body)
        permit = model.limits.take(1, Client.of(key, current().address).name)
        try:
            with as_problems():
                found = await _while_there(request, in_thread(current().size, given.answer, model))
        finally:
            permit.free()
        ignored = _listed("x-ignored-fields", sorted(given.further))
        return Response(found, media_type="application/json", headers=ignored)


def _add_shape(app: FastAPI, state: App, path: str, shape: type[Reply]) -> None:
    @app.post(path, name=shape.route)
    async def generate(request: Request) -> Response:
        headers = request.headers
        own_key = headers.get("x-api-key") if shape.own_headers else None
        key = state.keys.check(headers.get("authorization"), own_key)
        body = await _body(request, state)
        reply = await _while_there(request, state.start(shape, body, key))
        generations = state.ready().generations
        more = ({"request-id": reply.id} if shape.own_headers else {}) | _notes(reply.job)
        if not reply.job.stream:
            try:
                await _while_there(request, reply.finish())
            finally:
                generations.end(reply.generation)
            whole = reply.whole()
            return JSONResponse(whole, headers=more | _listed("x-broken-keywords", reply.broken()))
        events = reply.events(state.settings.heartbeat_seconds)
        if shape.done and "text/plain" in headers.get("accept", ""):
            return _GenerationStream(
                generations, reply, plain_text(events), "text/plain; charset=utf-8", more
            )
        return _GenerationStream(
            generations, reply, server_sent(events, shape.done), "text/event-stream", more | SSE_HEADERS
        )

    for short in (each for each, long in SHORT.items() if long == path):
        app.post(short, include_in_schema=False)(generate)


def _add_counter(app: FastAPI, state: App, path: str, counter: Counter) -> None:
    @app.post(path, name=counter.name)
    async def count(request: Request) -> Response:
        key = state.keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))
        model = state.ready()
        body = await _body(request, state)
        chat = await offloaded(current().size, counter.read, body)
        permit = model.limits.take(1, Client.of(key, current().address).name)
        try:
            with as_problems():
                reading = in_thread(current().size, Job.of, chat, model.llm, model.names)
                job = await _while_there(request, reading)
        finally:
            permit.free()
        return JSONResponse(counter.reply(sum(map(len, job.prompts))), headers=_notes(job))


def _add_socket(app: FastAPI, state: App) -> None:
    @app.websocket("/v1/stream")
    async def stream(socket: WebSocket) -> None:
        key = await opened(socket, state.keys)
        if key is None:
            return

        async def run(frame: dict[str, Any], send: Callable[[Event], Awaitable[None]]) -> None:
            shape = ChatReply if "messages" in frame else CompletionReply
            reply = await state.start(shape, {**frame, "stream": True}, key)
            with state.ready().generations.read(reply.generation):
                async for each in reply.events(None):
                    if each is not None:
                        await send(each)

        await Socket(socket, run, state.most_body, state.end, state.bodies).serve()


def _add_document(app: FastAPI, state: App) -> None:
    made = cache(lambda: document(app, keys=bool(state.keys)))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        state.keys.check(request.headers.get("authorization"))
        return JSONResponse(made())


async def _body(request: Request, state: App) -> dict[str, Any]:
    data = await request.body()
    return await _while_there(request, offloaded(len(data), json_object, data, state.most_body))


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns; a client that leaves cancels it."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Problem(499, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _notes(job: Job) -> dict[str, str]:
    """Return the headers that say what of a request has no effect here."""
    return (
        _listed("x-ignored-fields", job.ignored)
        | _listed("x-ignored-tools", job.ignored_tools)
        | _listed("x-unenforced-keywords", job.unenforced)
    )


def _listed(header: str, names: Sequence[str]) -> dict[str, str]:
    """Return a header that lists some of the names, each printable and short; none where there are none."""
    if not names:
        return {}
    shown = [repr(name[:LONGEST])[1:-1].encode("ascii", "backslashreplace").decode() for name in names[:20]]
    return {header: ", ".join([*shown, *([f"and {len(names) - 20} more"] if len(names) > 20 else [])])}


class _GenerationStream(StreamingResponse):
    """A stream whose generation ends with it, even where it never began."""

    def __init__(
        self,
        generations: Generations,
        reply: Reply,
        content: AsyncIterator[bytes],
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._generations, self._generation = generations, reply.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._generations.read(self._generation):
                await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            if not self._generation.dropped:
                raise


async def _end_abandoned(request: Request, gone: Exception) -> Response:
    """End a request whose client left while it was sending the body, which is no error of the server."""
    return Response(status_code=499)


async def _answer_problem(request: Request, problem: Problem) -> Response:
    forget_frames(problem)
    return answer(problem, request.url.path)


async def _answer_bug(request: Request, error: Exception) -> Response:
    logger.exception("a request failed by a defect of the server", exc_info=error)
    problem = Problem(500, "the server failed; its log has the reason", code="internal_error")
    problem.headers["x-request-id"] = current().id  # this answer does not pass `Recording`
    return answer(problem, request.url.path)


async def _answer_status(request: Request, error: Any) -> Response:
    if error.status_code == 404:
        problem = Problem(404, f"there is no {shortened(request.url.path)}", code="not_found")
    else:
        message = f"{request.method} is not allowed here"
        problem = Problem(405, message, code="method_not_allowed", headers=error.headers)
    return answer(problem, request.url.path)
