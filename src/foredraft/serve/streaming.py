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
from foredraft.serve.bodies import json_object
from foredraft.serve.limits import Bodies, Keys
from foredraft.serve.logs import RequestRecord, current
from foredraft.serve.offload import offloaded
from foredraft.serve.problems import Problem, forget_frames, invalid
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


async def encoded(
    events: AsyncIterator[Event | None], form: Callable[[Event | None], bytes], done: bytes = b""
) -> AsyncIterator[bytes]:
    """Yield events in the form of a stream, and `done` at the end."""
    async for event in events:
        if data := form(event):
            yield data
    if done:
        yield done


def server_sent(event: Event | None) -> bytes:
    """Return an event as a server-sent one, which is named by its type; None is a comment."""
    if event is None:
        return b": ping\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {as_json(event)}\n\n".encode()


def plain_text(event: Event | None) -> bytes:
    """Return the text that an event adds to the first choice; an error ends it with a line of its own."""
    if event is not None and "error" in event:
        return f"\nerror: {event['error']['message']}\n".encode()
    first = [each for each in (event or {}).get("choices", ()) if each["index"] == 0]
    return "".join(
        each["text"] if "text" in each else each["delta"].get("content", "") for each in first
    ).encode()


async def opened(socket: WebSocket, keys: Keys) -> bool:
    """Accept a WebSocket; return False where its key is refused."""
    try:
        keys.check(socket.headers.get("authorization"))
    except Problem:
        await socket.close(code=1008, reason="the API key is missing or wrong")
        return False
    await socket.accept()
    return True


LAST_SECONDS = 1.0  # in which the requests of a socket end once its client has left
MAX_OPEN = 64  # requests of one socket at a time
Run = Callable[[dict[str, Any], Callable[[Event], Awaitable[None]]], Awaitable[None]]


class Socket:
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
        self._endings: set[asyncio.Task[None]] = set()  # of those requests and of others, until they are sent
        self._sending = asyncio.Lock()
        self._closed = False
        self._over, self._record = over, current()

    async def serve(self) -> None:
        """Serve frames until the client leaves; its requests end then."""
        try:
            while True:
                # the client does not read: neither does the server
                while len(self._endings) - len(self._tasks) >= MAX_OPEN:
                    await asyncio.wait(self._endings, return_when=asyncio.FIRST_COMPLETED)
                await self._read(await self._socket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            self._closed = True
            for task in self._tasks.values():
                task.cancel()
            if self._endings:  # each logs how its request ended, and sends nothing
                _, stuck = await asyncio.wait(self._endings, timeout=LAST_SECONDS)
                for ending in stuck:  # in the midst of a frame that the client does not read
                    ending.cancel()

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
                raise invalid("id", "a frame needs an id: a string of 1 to 256 characters")
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
        ending = asyncio.create_task(self._end(id, task))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _answer(self, id: str, frame: dict[str, Any], size: int) -> None:
        async def send(chunk: Event) -> None:
            held.shrink()
            await self._send(id, chunk if "error" in chunk else {"chunk": chunk})

        socket = self._record
        record = RequestRecord(
            socket.method, socket.path, socket.headers, f"{socket.id}/{id}", size=size, key=socket.key,
            address=socket.address,
        )  # fmt: skip
        record.begin()
        held = self._bodies.of_address(record.address)
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

    async def _end(self, id: str, task: asyncio.Task[None]) -> None:
        """Tell the client how a request ended, however early that was."""
        await asyncio.wait({task})
        del self._tasks[id]
        frames, reason = list[Event](), "finished"
        if task.cancelled():
            reason = "cancelled"
        elif (error := task.exception()) is not None:
            reason = "error"
            if not isinstance(error, Problem):
                logger.error("a request failed by a defect of the server", exc_info=error)
                error = Problem(500, "the server failed; its log has the reason", code="internal_error")
            forget_frames(error)
            frames.append(error.body)
        with suppress(Exception):  # the client has gone
            for frame in () if self._closed else (*frames, {"done": True, "reason": reason}):
                await self._send(id, frame)

    async def _send(self, id: str | None, fields: Event) -> None:
        async with self._sending:
            await self._socket.send_text(as_json({"id": id, **fields}))
