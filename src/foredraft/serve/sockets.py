"""Sockets: several requests at a time over one WebSocket.

A client sends JSON frames: a request with an `id` of its own beside the fields of the API (`messages` make it
a chat), or `{"id": ..., "cancel": true}`. The server answers with frames that carry the same `id`: `chunk`,
then `done`, or `error`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from foredraft.serve.problems import Problem
from foredraft.serve.streaming import as_json

__all__ = ["MOST_OPEN", "Socket"]

MOST_OPEN = 64  # requests of one socket at a time
Run = Callable[[dict[str, Any], Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]


class Socket:
    """One WebSocket and its requests.

    Args:
        socket: Accepted already.
        run: Runs a request to its end, and sends each chunk by the function that it gets.
        max_frame: Largest frame of a client, in characters.
    """

    def __init__(self, socket: WebSocket, run: Run, max_frame: int) -> None:
        self._socket, self._run, self._max_frame = socket, run, max_frame
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sending = asyncio.Lock()

    async def serve(self) -> None:
        """Serve frames until the client leaves; its requests end then."""
        try:
            while True:
                await self._read(await self._socket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _read(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        text = message.get("text")
        try:
            if text is None:
                raise ValueError("a frame must be text")
            if len(text) > self._max_frame:
                raise ValueError(f"a frame has more than {self._max_frame} characters")
            frame = json.loads(text)
            if not isinstance(frame, dict):
                raise ValueError("a frame must be a JSON object")
        except (ValueError, RecursionError) as error:
            await self._send(None, Problem(400, f"{error}", code="invalid_frame").body)
            return
        id = frame.pop("id", None)
        if not isinstance(id, str) or not id or len(id) > 256:
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
        elif len(self._tasks) >= MOST_OPEN:
            await self._send(id, Problem(429, f"{MOST_OPEN} requests are open on this socket").body)
        else:
            self._tasks[id] = asyncio.create_task(self._answer(id, frame))

    async def _answer(self, id: str, frame: dict[str, Any]) -> None:
        async def send(chunk: dict[str, Any]) -> None:
            await self._send(id, chunk if "error" in chunk else {"chunk": chunk})

        reason = "finished"
        try:
            await self._run(frame, send)
        except Problem as problem:
            await self._send(id, problem.body)
            reason = "error"
        except asyncio.CancelledError:
            reason = "cancelled"
        finally:
            self._tasks.pop(id, None)
        await self._send(id, {"done": True, "reason": reason})

    async def _send(self, id: str | None, fields: dict[str, Any]) -> None:
        async with self._sending:
            await self._socket.send_text(as_json({"id": id, **fields}))
