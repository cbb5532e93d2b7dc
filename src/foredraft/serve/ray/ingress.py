"""The ingress: takes the requests of clients, and passes each on to the replica that its prompt prefers.

A replica answers, and its bytes go to the client as they come. The ingress answers only where a replica died
or too much waits. It sends no request again: one that kills its replica must not kill the next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import Context
from typing import Any, TypeAlias

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from foredraft.serve.affinity import prompt_key
from foredraft.serve.bodies import MORE_BODIES, SHAPES, BoundedBodies, KnownOrigins, answer
from foredraft.serve.completions import CompletionReply
from foredraft.serve.limits import Bodies, Keys
from foredraft.serve.metrics import labelled
from foredraft.serve.problems import Problem, busy
from foredraft.serve.ray.replica import HttpCall
from foredraft.serve.replies import Reply
from foredraft.serve.settings import Settings
from foredraft.serve.streaming import Socket, opened, plain_text, server_sent

logger = logging.getLogger(__name__)

Parts: TypeAlias = AsyncGenerator[Any, None]  # the head of a response, as ASGI has it, and its bytes
METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]
MAX_BODY = 8 << 20  # bytes, where no option says it; a replica knows its context and may take less
METRICS_SECONDS = 5.0  # that a replica has for its metrics


class Ingress:
    def __init__(self, replicas: DeploymentHandle[Any], settings: Settings, prefix_characters: int) -> None:
        self._replicas, self._settings, self._characters = replicas, settings, prefix_characters
        self._calls = replicas.options(method_name="answer", stream=True)
        self._keys = Keys.of(settings)
        self._most_body = settings.max_body or MAX_BODY
        self._bodies = Bodies(lambda: settings.max_bodies or MORE_BODIES * self._most_body)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the ASGI app; Ray calls this."""
        return Starlette(
            routes=[
                Route("/metrics", self._metrics),
                WebSocketRoute("/v1/stream", self._stream),
                Route("/{path:path}", self._forward, methods=METHODS),
            ],
            middleware=[
                Middleware(KnownOrigins, known=self._settings.cors),
                Middleware(BoundedBodies, most=lambda: self._most_body, all_=self._bodies),
            ],
            exception_handlers={Problem: _answer_problem},
        )

    async def _forward(self, request: Request) -> Response:
        body, path = await request.body(), "/" + request.path_params["path"]
        query, headers = request.scope["query_string"], request.headers.raw
        address, key = _address(request), self._key(request, body)
        call = HttpCall(request.method, path, query, headers, body, address, key)
        parts = self._answers(call)
        head = await anext(parts)
        kind = dict(head["headers"]).get(b"content-type", b"")
        if kind.startswith((b"text/event-stream", b"text/plain")):
            shape = SHAPES.get(path, CompletionReply)
            return _ReplicaStream(head, parts, shape, plain=kind.startswith(b"text/plain"))
        return _with(head, Response(b"".join([part async for part in parts])))

    def _key(self, request: Request, body: bytes) -> int | None:
        """Return the key of the prompt; None where there is none, or the replica will refuse the request."""
        with suppress(ValueError, RecursionError, Problem):
            self._keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))
            fields = json.loads(body or b"null")
            if isinstance(fields, dict):
                return prompt_key(fields, self._characters)
        return None

    async def _answers(self, call: HttpCall, *, alone: bool = False) -> Parts:
        """Yield what a replica sends; leaving early ends its work."""
        # Ray's router knows a waiting call by the id of the request that it belongs to, and all calls of one
        # WebSocket belong to one. In a context of its own, each call has an id of its own.
        answers = Context().run(self._calls.remote, call) if alone else self._calls.remote(call)
        try:
            async for each in answers:
                yield each
        except BackPressureError as error:
            raise busy("too many requests wait for a replica") from error
        except (RayServeException, RayTaskError) as error:
            logger.exception("a replica failed")
            raise Problem(500, "the server failed; its log has the reason", code="internal_error") from error
        except RayError as error:  # of the actor, its machine, or the way there
            raise Problem(
                503, "the replica that answered this request died; send it again", code="replica_died",
                headers={"Retry-After": "1"},
            ) from error  # fmt: skip
        finally:
            answers.cancel()

    async def _metrics(self, request: Request) -> Response:
        self._keys.check(request.headers.get("authorization"))
        answers = self._replicas.broadcast("metrics")
        found = await answers.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        texts: dict[str, str] = dict(each for each in found if isinstance(each, tuple))  # others just died
        return PlainTextResponse(labelled(texts), media_type="text/plain; version=0.0.4")

    async def _stream(self, socket: WebSocket) -> None:
        """Serve a WebSocket; each of its requests goes to the replica that its prompt prefers."""
        if await opened(socket, self._keys) is None:
            return
        headers = [(b"content-type", b"application/json")]
        headers += [(k, v) for k, v in socket.headers.raw if k == b"authorization"]

        async def run(frame: dict[str, Any], send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
            path = "/v1/chat/completions" if "messages" in frame else "/v1/completions"
            body = json.dumps({**frame, "stream": True}).encode()
            key = prompt_key(frame, self._characters)
            call = HttpCall("POST", path, b"", headers, body, address=_address(socket), key=key)
            async with aclosing(_chunks(self._answers(call, alone=True))) as chunks:
                async for chunk in chunks:
                    await send(chunk)

        await Socket(
            socket, run, self._most_body, over=lambda record: None, bodies=self._bodies
        ).serve()  # replicas keep records


class _ReplicaStream(StreamingResponse):
    """A stream of a replica. Where the replica fails, the stream says so, and ends as its client expects."""

    def __init__(self, head: Message, parts: Parts, shape: type[Reply], *, plain: bool) -> None:
        super().__init__(self._body())
        _with(head, self)
        self._parts, self._shape, self._plain = parts, shape, plain

    async def _body(self) -> AsyncIterator[bytes]:
        sent, shape = 0, self._shape
        try:
            async for part in self._parts:
                sent += part.count(b"\n\n")
                yield part
        except Problem as problem:
            last = shape.numbered(shape.failure(problem), sent)
            yield plain_text(last) if self._plain else server_sent(last) + shape.done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._parts.aclose()


def _address(connection: HTTPConnection) -> str:
    return "" if connection.client is None else connection.client.host


def _with(head: Message, response: Response) -> Response:
    """Give a response a replica's head, but for the id of the request, which Ray's proxy adds."""
    response.status_code = head["status"]
    response.raw_headers = [(name, value) for name, value in head["headers"] if name != b"x-request-id"]
    return response


async def _chunks(parts: Parts) -> AsyncGenerator[dict[str, Any], None]:
    head, rest = await anext(parts), b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: "))
    if head["status"] != 200:
        raise Problem.read(head["status"], json.loads(rest))


async def _answer_problem(request: Request, problem: Any) -> Response:
    return answer(problem, request.url.path)
