"""Streaming: events as server-sent events, as plain text, or several requests at a time over one WebSocket.

A client sends JSON frames: a request with an `id` of its own beside the fields of the API (`messages` make it
a chat), or `{"id": ..., "cancel": true}`. The server answers with frames that carry the same `id`: `chunk`,
then `done`, or `error`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from foredraft.errors import invalid_at
from foredraft.serve.bodies import Bodies, json_object
from foredraft.serve.limits import Keys
from foredraft.serve.logs import RequestRecord, current
from foredraft.serve.offload import offloaded
from foredraft.serve.problems import Problem, forget_frames
from foredraft.serve.replies import Event

logger = logging.getLogger(__name__)

# A proxy must neither keep nor compress an event stream.
SSE_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


def prefers_text(accept: str) -> bool:
    """Return whether a header prefers plain text to events and to JSON (RFC 9110, 12.5.1)."""
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (word.strip().lower() for word in part.split(";"))
        given = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        with suppress(ValueError):
            weights[kind] = float(given)
    others = [
        next((weights[kind] for kind in (name, name.split("/")[0] + "/*", "*/*") if kind in weights), 0.0)
        for name in ("text/event-stream", "application/json")
    ]
    return weights.get("text/plain", 0.0) > max(others)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def server_sent(events: AsyncIterator[Event | None], done: bytes) -> AsyncIterator[bytes]:
    """Yield server-sent events, which are named by their types, and `done` at the end; None is a comment."""
    async for event in events:
        if event is None:
            yield b": ping\n\n"
        else:
            name = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{name}data: {as_json(event)}\n\n".encode()
    if done:
        yield done


async def plain_text(events: AsyncIterator[Event | None]) -> AsyncIterator[bytes]:
    """Yield the text of the first choice as it comes; an error ends it with a line of its own."""
    async for event in events:
        if event is None:
            continue
        if "error" in event:
            yield f"\nerror: {event['error']['message']}\n".encode()
        for choice in event.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if choice["index"] == 0 and text:
                yield text.encode()


async def opened(socket: WebSocket, keys: Keys) -> str | None:
    """Accept a WebSocket and return the name of its key; None where it was refused."""
    try:
        name = keys.check(socket.headers.get("authorization"))
    except Problem:
        await socket.close(code=1008, reason="the API key is missing or wrong")
        return None
    await socket.accept()
    return name


MAX_OPEN = 64  # requests of one socket at a time
Run = Callable[[dict[str, Any], Callable[[Event], Awaitable[None]]], Awaitable[None]]


class Socket:
    """One WebSocket and its requests."""

    def __init__(
        self,
        socket: WebSocket,  # accepted already
        run: Run,  # runs a request to its end, and sends each chunk by the function that it gets
        max_frame: int,  # largest frame of a client, in characters
        over: Callable[[RequestRecord], None],  # takes the record of each request that is over
        bodies: Bodies,  # what its requests count in until they are answered
    ) -> None:
        self._bodies = bodies
        self._socket, self._run, self._max_frame = socket, run, max_frame
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()  # kept until they are sent
        self._sending = asyncio.Lock()
        self._closed = False
        self._over, self._record = over, current()

    async def serve(self) -> None:
        """Serve frames until the client leaves; its requests end then."""
        try:
            while True:
                while len(self._endings) >= MAX_OPEN:  # the client does not read: neither does the server
                    await asyncio.wait(self._endings, return_when=asyncio.FIRST_COMPLETED)
                await self._read(await self._socket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            self._closed = True
            open_ = [*self._tasks.values(), *self._endings]
            for task in open_:
                task.cancel()
            await asyncio.gather(*open_, return_exceptions=True)

    async def _read(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        id, text = None, message.get("text")
        try:
            if text is None:
                raise Problem(400, "a frame must be text", code="invalid_json")
            if len(text) > self._max_frame:
                says = f"a frame has more than {self._max_frame} characters (--max-body)"
                raise Problem(413, says, code="body_too_large")
            frame = await offloaded(len(text), json_object, text, self._max_frame)
            given = frame.pop("id", None)
            if not isinstance(given, str) or not 0 < len(given) <= 256 or invalid_at(given) is not None:
                raise Problem(400, "a frame needs an id: a string of 1 to 256 characters", param="id")
            task = self._tasks.get(given)
            if frame.get("cancel") is not True and task is not None:
                body = Problem(409, f"request {given!r} is open already", param="id").body
                await self._send(None, {**body, "of": given})
                return
            id = given
            if frame.get("cancel") is True:
                if task is None:
                    raise Problem(404, f"no request {id!r} is open", param="id")
                task.cancel()
                return
            if len(self._tasks) >= MAX_OPEN:
                raise Problem(429, f"{MAX_OPEN} requests are open on this socket")
        except Problem as refused:
            forget_frames(refused)
            await self._send(id, refused.body)
            return
        task = self._tasks[id] = asyncio.create_task(self._answer(id, frame, len(text)))
        task.add_done_callback(lambda done: self._end(id, done))

    async def _answer(self, id: str, frame: dict[str, Any], size: int) -> None:
        async def send(chunk: Event) -> None:
            held.shrink()
            await self._send(id, chunk if "error" in chunk else {"chunk": chunk})

        socket = self._record
        record = RequestRecord(
            socket.method, socket.path, socket.headers, f"{socket.id}/{id}", key=socket.key
        )
        record.address = socket.address
        record.size = size
        record.begin()
        held = self._bodies.of(record.address)
        try:
            held.grow(size)
            await self._run(frame, send)
            record.status = 200
        except Problem as problem:
            record.status = problem.status
            raise
        except (asyncio.CancelledError, WebSocketDisconnect):  # the client left while a chunk was sent
            record.status = 499
            raise asyncio.CancelledError from None
        finally:
            held.shrink()
            self._over(record)

    def _end(self, id: str, task: asyncio.Task[None]) -> None:
        """Tell the client how a request ended, however early that was."""
        self._tasks.pop(id, None)
        frames: list[Event] = []
        reason = "finished"
        if task.cancelled():
            reason = "cancelled"
        elif (error := task.exception()) is not None:
            reason = "error"
            if not isinstance(error, Problem):
                logger.error("a request failed by a defect of the server", exc_info=error)
                error = Problem(500, "the server failed; its log has the reason", code="internal_error")
            forget_frames(error)
            frames.append(error.body)
        frames.append({"done": True, "reason": reason})

        async def send_all() -> None:
            with suppress(Exception):  # the client has gone
                for frame in frames:
                    await self._send(id, frame)

        if not self._closed:
            ending = asyncio.create_task(send_all())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _send(self, id: str | None, fields: Event) -> None:
        async with self._sending:
            await self._socket.send_text(as_json({"id": id, **fields}))
