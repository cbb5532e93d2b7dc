"""The deployments: an ingress that takes requests, replicas that answer them, and the router between both.

A replica is the app of `foredraft serve`, called by the ingress instead of by a socket. The router chooses it
by the rule of `affinity`: all routers know the same replicas, so they agree about the replica of a key. The
bytes of a replica go to the client as they come. The ingress answers only where a replica died or too much
waits. It sends no request again: one that kills its replica must not kill the next.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket

import foredraft
from foredraft.model.memory import freeze_what_is_loaded
from foredraft.serve.affinity import digest, prompt_key, ranked
from foredraft.serve.app import create_app
from foredraft.serve.bodies import MORE_BODIES, SHAPES, BoundedBodies, KnownOrigins, answer
from foredraft.serve.completions import CompletionReply
from foredraft.serve.limits import Bodies, Keys
from foredraft.serve.logs import to_stderr
from foredraft.serve.metrics import labelled
from foredraft.serve.problems import Problem, busy
from foredraft.serve.replies import Reply
from foredraft.serve.settings import Settings
from foredraft.serve.state import App
from foredraft.serve.streaming import Socket, opened, plain_text, server_sent

logger = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    method: str  # GET, POST, ..
    path: str  # of the URL
    query: bytes  # of the URL
    headers: Headers  # as ASGI has them
    body: bytes  # whole
    address: str = ""  # of the client, as Ray's proxy sees it; "" where it is not known
    key: int | None = None  # of `affinity.prompt_key`


TRIED = 4  # replicas that a request tries before it waits; each that is full costs a message


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is not typed
    """Prefers the replica that the key of a call has."""

    def initialize_state(self, free: int) -> None:
        """Take the option of the deployment; `free` as in `affinity.bound`."""
        self._free = free
        self._names: dict[str, int] = {}  # of replicas -> their digests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in this order."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full
        key = next((each.key for each in pending_request.args if isinstance(each, HttpCall)), None)
        known = self._digests([replica.replica_id.unique_id for replica in candidate_replicas])
        lengths = self.replica_queue_len_cache
        loads = [lengths.get(replica.replica_id) or 0 for replica in candidate_replicas]
        places = ranked(key, known, loads, self._free)
        return [[candidate_replicas[place]] for place in places[:TRIED]]

    def _digests(self, names: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        if self._names.keys() != set(names):
            self._names = {name: digest(name) for name in names}
        return np.array([self._names[name] for name in names], dtype=np.uint64)


class Replica:
    """One model and the app around it. Ray counts a replica as ready once it is made."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str | None, load: dict[str, Any], settings: Settings
    ) -> None:
        self._logs = to_stderr(settings)
        self._logs.__enter__()
        self._app = create_app(lambda: foredraft.load(model, **load), settings, local=False)
        self._state: App = self._app.state.foredraft
        self._lifespan = self._app.router.lifespan_context(self._app)
        loop, loaded = asyncio.get_running_loop(), asyncio.Event()

        def end(_: object) -> None:
            loop.call_soon_threadsafe(loaded.set)

        self._state.on_loaded = end
        await self._lifespan.__aenter__()
        await loaded.wait()
        if self._state.failed is not None:
            await self._lifespan.__aexit__(None, None, None)
            raise self._state.failed
        freeze_what_is_loaded()

    def check_health(self) -> None:
        """Raise RuntimeError where the engine's thread has ended; Ray replaces the replica then."""
        if not self._state.ready().service.alive:
            raise RuntimeError("the engine's thread has ended")

    def metrics(self) -> tuple[str, str]:
        """Return the name of this replica, and its metrics, for Prometheus."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._state.metrics.text().decode()

    async def answer(self, call: HttpCall) -> AsyncIterator[Message | bytes]:
        """Yield the head and the parts of the body of a response; a cancelled call ends its request."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "root_path": "", "method": call.method, "path": call.path, "raw_path": call.path.encode(),
            "query_string": call.query, "headers": call.headers, "server": None,
            "client": (call.address, 0) if call.address else None,
        }  # fmt: skip

        async def receive() -> Message:
            if not unread:  # a client that leaves cancels the app
                await asyncio.Event().wait()
            return unread.pop()

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                sent.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            whole = False
            while not whole:
                messages = [await sent.get()]
                while not sent.empty():  # what has come meanwhile goes in one message of Ray's
                    messages.append(sent.get_nowait())
                body = b""
                for message in messages:
                    if message is None:
                        if not whole:
                            raise RuntimeError("the response broke off; the replica's log has the reason")
                    elif message["type"] == "http.response.start":
                        yield message
                    else:
                        body += message.get("body", b"")
                        whole = not message.get("more_body", False)
                if body:
                    yield body
        finally:
            running.cancel()

    async def __del__(self) -> None:
        """End the engine; Ray calls this once no request is left, or time is up."""
        await self._lifespan.__aexit__(None, None, None)
        self._logs.__exit__(None, None, None)


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
        if not await opened(socket, self._keys):
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
    return answer(problem, "/" + request.path_params.get("path", ""))  # without the prefix of its route
