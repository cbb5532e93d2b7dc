"""Sockets: several requests at a time over one WebSocket.

A client sends JSON frames: a request with an `id` of its own beside the fields of the API (`messages` make it
a chat), or `{"id": ..., "cancel": true}`. The server answers with frames that carry the same `id`: `chunk`,
then `done`, or `error`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from foredraft.serve.beside import beside
from foredraft.serve.bodies import Bodies, json_object
from foredraft.serve.problems import Problem, forget_frames
from foredraft.serve.replies import Event
from foredraft.serve.request_records import RequestRecord, current
from foredraft.serve.streaming import as_json
from foredraft.unicode import invalid_at

__all__ = ["MAX_OPEN", "Socket"]

logger = logging.getLogger(__name__)

MAX_OPEN = 64  # requests of one socket at a time
Run = Callable[[dict[str, Any], Callable[[Event], Awaitable[None]]], Awaitable[None]]


class Socket:
    """One WebSocket and its requests.

    Args:
        socket: Accepted already.
        run: Runs a request to its end, and sends each chunk by the function that it gets.
        max_frame: Largest frame of a client, in characters.
        over: Takes the record of each request that is over.
        bodies: What its requests count in until they are answered.
    """

    def __init__(
        self,
        socket: WebSocket,
        run: Run,
        max_frame: int,
        over: Callable[[RequestRecord], None],
        bodies: Bodies,
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
        try:
            text = message.get("text")
            frame = await self._frame(text)
        except Problem as refused:
            forget_frames(refused)
            await self._send(None, refused.body)
            return
        id = frame.pop("id", None)
        if not isinstance(id, str) or not id or len(id) > 256 or invalid_at(id) is not None:
            problem = Problem(400, "a frame needs an id: a string of 1 to 256 characters", param="id")
            await self._send(None, problem.body)
        elif frame.get("cancel") is True:
            task = self._tasks.get(id)
            if task is None:
                await self._send(id, Problem(404, f"no request {id!r} is open", param="id").body)
            else:
                task.cancel()
        elif id in self._tasks:
            await self._send(
                None, {**Problem(409, f"request {id!r} is open already", param="id").body, "of": id}
            )
        elif len(self._tasks) >= MAX_OPEN:
            await self._send(id, Problem(429, f"{MAX_OPEN} requests are open on this socket").body)
        else:
            task = self._tasks[id] = asyncio.create_task(self._answer(id, frame, len(text)))
            task.add_done_callback(lambda done: self._end(id, done))

    async def _frame(self, text: str | None) -> dict[str, Any]:
        if text is None:
            raise Problem(400, "a frame must be text", code="invalid_json")
        if len(text) > self._max_frame:
            raise Problem(
                413, f"a frame has more than {self._max_frame} characters (--max-body)", code="body_too_large"
            )
        return await beside(len(text), json_object, text, self._max_frame)

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
        except asyncio.CancelledError:
            record.status = 499
            raise
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
        if not self._closed:
            ending = asyncio.create_task(self._send_all(id, frames))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _send_all(self, id: str, frames: list[Event]) -> None:
        with suppress(Exception):  # the client has gone
            for frame in frames:
                await self._send(id, frame)

    async def _send(self, id: str | None, fields: Event) -> None:
        async with self._sending:
            await self._socket.send_text(as_json({"id": id, **fields}))
