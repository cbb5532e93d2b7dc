"""The server: uvicorn around the app. It starts at once, loads the model beside it, and drains at the end.

A client may cost only so much before a request of it is read, or while it does not read replies. uvicorn's
protocols bound neither the bytes nor the time of a head, nor what a client sends or leaves unread over a
WebSocket. These subclasses do: they hand bytes to the parsers in small slices.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Literal, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import DATA_OPCODES, Frame

from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.memory import freeze_what_is_loaded
from foredraft.serve.app import create_app
from foredraft.serve.generations import Model
from foredraft.serve.limits import Connections
from foredraft.serve.logs import to_stderr
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings
from foredraft.serve.state import SWEEP_SECONDS, App

SLICE = 4 << 10  # bytes that a parser gets at a time: a few hundred frames or requests at most
MAX_HEAD = 64 << 10  # bytes of a request line and its headers; proxies allow 8 to 32 KiB
FRAMING = 8  # bytes of framing for each byte of a body in chunks; the smallest chunk needs 6
FRAMES_PER_SECOND = 1000  # of one WebSocket, fragments and pings too
FRAMES_AT_ONCE = 4 * FRAMES_PER_SECOND  # a message of the largest size in fragments of a few KiB
# A connection that is refused is read a little longer: closing it with bytes unread would make the kernel
# throw the reply away.
LINGER_SECONDS, MAX_THROWN = 1.0, 1 << 20


class _Flow(FlowControl):
    """Reading that stays paused while requests wait that were read already."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Bounded:
    """What both kinds of connections have: a place among all, a timer, and an end that reads on a while."""

    transport: asyncio.Transport

    def _join(self, connections: Connections) -> None:
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._ended, self._thrown = False, 0  # what comes from now on is thrown away; bytes of it

    def _leave(self) -> None:
        self._stop_timer()
        self._all.leave(self.transport)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _throws_away(self, data: bytes) -> bool:
        """Return whether the connection has ended, so that bytes of it no longer count."""
        if self._ended:
            self._thrown += len(data)
            if self._thrown > MAX_THROWN:
                self.transport.close()
        return self._ended


class _AnyLength(int):
    """The length of a body that ends where the connection does."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class HttpConnection(_Bounded, HttpToolsProtocol):
    """An HTTP connection whose heads, bodies and waiting requests are bounded in bytes and time."""

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self._join(connections)
        self._unread = bytearray()  # not yet given to the parser
        self._state = "head"  # or "body", which begins where the head ends
        self._framing = self._body = 0  # bytes of the message so far
        self._turned = False  # a head or a message has ended within the slice

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        if (refused := self._all.enter(transport)) is not None:
            self._refuse(refused)
            transport.close()
            return
        self._start_timer("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unread.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._throws_away(data):
            return
        self._unread += data
        self._feed()

    def _feed(self) -> None:
        """Give the parser what has come, as far as no request waits for another one."""
        while self._unread and not self.pipeline and not (self._ended or self.transport.is_closing()):
            part = bytes(self._unread[:SLICE])
            del self._unread[:SLICE]
            if self._timer is None and self._state == "head":
                self._start_timer("head")
            body, self._turned = self._body, False
            super().data_received(part)
            if self.transport.get_protocol() is not self:  # a WebSocket now
                self._stop_timer()
                self._unread.clear()
                return
            if not self._turned:
                self._framing += len(part) - (self._body - body)
            if self._framing > MAX_HEAD + FRAMING * self._body:
                where = "head" if self._state == "head" else "framing of the body"
                self._refuse(Problem(431, f"the {where} has more than {MAX_HEAD} bytes"))
        if self._unread and not (self._ended or self.transport.is_closing()):
            self.flow.pause_reading()
            self.flow.held = True

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and self.scope["http_version"] == "1.0":  # which knows no chunks
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
        self._state, self._framing, self._body, self._turned = "body", 0, 0, True
        self._start_timer("body")

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._state, self._framing, self._body, self._turned = "head", 0, 0, True
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.flow.held = False
        super().on_response_complete()
        if self._unread:
            self._unset_keepalive_if_required()
            self.loop.call_soon(self._feed)

    def _start_timer(self, part: Literal["head", "body"]) -> None:
        self._stop_timer()
        settings = self._all.settings
        seconds = settings.head_seconds if part == "head" else settings.body_seconds
        says = f"the {part} of the request did not come within {seconds:g} seconds (--{part}-seconds)"
        self._timer = self.loop.call_later(seconds, self._refuse, Problem(408, says))

    def _refuse(self, problem: Problem) -> None:
        """Answer in place of the app, unless it answers already, and end the connection."""
        self._stop_timer()
        self._unread.clear()
        if self.transport.is_closing():
            return
        started = False
        if self.cycle is not None and not self.cycle.response_complete:
            started = self.cycle.response_started
            self.cycle.disconnected = True  # for the app, the client has gone
            self.cycle.message_event.set()
        if not started:
            body = json.dumps(problem.body).encode()
            headers = {
                "content-type": "application/json", "content-length": str(len(body)), "connection": "close",
                **problem.headers,
            }  # fmt: skip
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[problem.status] + lines.encode() + b"\r\n" + body)
        self._ended = True
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


class SocketConnection(_Bounded, WebSocketsSansIOProtocol):
    """A WebSocket whose frames are bounded in number and bytes, and whose client must read its replies."""

    def __init__(self, *args: Any, connections: Connections, **more: Any) -> None:
        more["config"].ws_max_size = connections.largest_frame()
        super().__init__(*args, **more)
        self._join(connections)
        self._left, self._counted = float(FRAMES_AT_ONCE), time.monotonic()
        self._fragments = self._whole = 0  # bytes of a message that lacks its end; of those the app works on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._held = self._all.bodies.of_address(self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._ended = True
        self._held.shrink()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._throws_away(data):
            return
        for start in range(0, len(data), SLICE):
            if self.transport.is_closing() or self._ended:
                return
            part = data[start : start + SLICE]
            try:
                self._held.grow(len(part))
            except Problem as full:
                self._end(1013, full.message)
                return
            super().data_received(part)
            self._let_go()

    def _let_go(self) -> None:
        """Hold what the app has not handled yet, and the frame and the message that lack their ends."""
        if not self._ended:
            self._held.shrink(self._whole + self._fragments + len(self.conn.reader.buffer))

    def handle_events(self) -> None:
        for event in self.conn.events:
            if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
                self._fragments += len(event.data)
                if event.fin:
                    self._whole, self._fragments = self._whole + self._fragments, 0
        now = time.monotonic()
        self._left = min(FRAMES_AT_ONCE, self._left + (now - self._counted) * FRAMES_PER_SECOND)
        self._counted = now
        self._left -= len(self.conn.events)
        if self._left < 0:
            self.conn.events.clear()
            self._end(1008, f"more than {FRAMES_PER_SECOND} frames a second")
            return
        super().handle_events()

    def pause_writing(self) -> None:
        """Read nothing that could make further replies while the client does not read those that wait."""
        super().pause_writing()
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()
        seconds = self._all.settings.slow_reader_seconds
        self._timer = self.loop.call_later(2 * seconds, self._end, 1008, "the client does not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()
        self._resume_reading()

    async def receive(self) -> Any:
        if self.queue.empty():  # the app has handled all that it took
            self._whole = 0
            self._let_go()
        message = await self.queue.get()
        self._resume_reading()
        return message

    def _resume_reading(self) -> None:
        goes_on = self.queue.empty() and self.writable.is_set() and not self.transport.is_closing()
        if self.read_paused and goes_on:
            self.read_paused = False
            self.transport.resume_reading()

    def _end(self, code: int, reason: str) -> None:
        """Close the WebSocket with a code; a client that does not read gets as much as the kernel takes."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        waits = not self.writable.is_set()
        self.conn.fail(code, reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        self._ended = True
        self._held.shrink()
        if waits:
            self.transport.abort()
        else:
            self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
            self.transport.resume_reading()


LAST_WORDS_SECONDS = 3  # for sending what is ready, once all requests are over
# Bytes of a connection that the kernel takes before the server waits for the reader. Its own choice is
# megabytes, which is a whole text, so that the server would never notice a slow reader.
SEND_BUFFER = 64 << 10


class _Server(uvicorn.Server):
    """Drains after the first signal; ends the process at once after the second, whatever its threads do."""

    def __init__(self, config: uvicorn.Config, state: App) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(0)  # Python's own end would wait for threads at work
        self._state.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish before connections are closed: uvicorn closes WebSockets at once."""
        await self._state.finish()
        await super().shutdown(sockets)


def serve(load: Callable[[], LLM], settings: Settings, on_ready: Callable[[str, Model, bool], None]) -> bool:
    app = create_app(load, settings)
    state: App = app.state.foredraft
    listening = listen(settings)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = make_server(app, settings)

    def loaded(model: Model | None) -> None:
        if model is None:
            server.should_exit = True
            return
        freeze_what_is_loaded()  # to walk over it stops all streams for 0.13 s
        on_ready(address, model, bool(state.keys))

    state.on_loaded = loaded
    with to_stderr(settings):
        server.run(sockets=[listening])
    if state.failed is not None:
        raise state.failed
    return state.model is not None


def make_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    state: App = app.state.foredraft
    # of a WebSocket, in bytes; `Socket` bounds characters, with an error
    connections = Connections(settings, lambda: 4 * state.most_body, state.bodies)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS, log_config=None,
        ws_per_message_deflate=False, http=cast(Any, partial(HttpConnection, connections=connections)),
        ws=cast(Any, partial(SocketConnection, connections=connections)),
    )  # fmt: skip
    return _Server(config, state)


def listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited: the kernel ends connections that are stuck
            stuck = round(2000 * (settings.slow_reader_seconds + SWEEP_SECONDS))  # after streams are dropped
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(stuck, 2**31 - 1))
        listening.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listening.close()
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot be listened on at {settings.host} ({problem})", option="port", value=settings.port,
            remedy="give another port or host; port 0 takes a free one",
        ) from error  # fmt: skip
    return listening
