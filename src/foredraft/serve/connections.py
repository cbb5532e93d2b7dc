"""Connections: what a client may cost before a request of it is read, or while it does not read replies.

uvicorn's protocols bound neither the bytes nor the time of a head, nor what a client sends or leaves unread
over a WebSocket. These subclasses do: they hand bytes to the parsers in small slices.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import DATA_OPCODES, Frame

from foredraft.serve.bodies import Bodies
from foredraft.serve.problems import Problem, busy
from foredraft.serve.settings import Settings

SLICE = 4 << 10  # bytes that a parser gets at a time: a few hundred frames or requests at most
MAX_HEAD = 64 << 10  # bytes of a request line and its headers; proxies allow 8 to 32 KiB
FRAMING = 8  # bytes of framing for each byte of a body in chunks; the smallest chunk needs 6
FRAMES_PER_SECOND = 1000  # of one WebSocket, fragments and pings too
FRAMES_AT_ONCE = 4 * FRAMES_PER_SECOND  # a message of the largest size in fragments of a few KiB
# A connection that is refused is read a little longer: closing it with bytes unread would make the kernel
# throw the reply away.
LINGER_SECONDS, MAX_THROWN = 1.0, 1 << 20
RESERVED_FILES = 64  # descriptors that are no connections: files of models, pipes, the event loop


class Connections:
    """All connections of a server, by address; the process may open more files from now on, if it may.

    Where it may not, one address gets the same part of all connections as the options give it.
    """

    def __init__(self, settings: Settings, largest_frame: Callable[[], int], bodies: Bodies) -> None:
        self.settings, wanted = settings, settings.max_connections
        self.largest_frame = largest_frame  # returns the most bytes of a message of a WebSocket
        self.bodies = bodies  # what messages of WebSockets count in, beside bodies
        self.most = max(1, _open_files(wanted + RESERVED_FILES) - RESERVED_FILES)  # in all
        # of one address, rounded up; 0 is no limit
        self.most_of_address = -(-settings.max_connections_per_address * self.most // wanted)
        self._addresses: dict[int, str] = {}
        self._by_address: Counter[str] = Counter()

    def enter(self, transport: Any) -> Problem | None:
        """Count a connection; return why it is refused, or None."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self._addresses[id(transport)] = address
        self._by_address[address] += 1
        most = self.most_of_address
        if len(self._addresses) > self.most:
            return busy(f"{self.most} connections are open, as many as there may be (--max-connections)")
        if most and self._by_address[address] > most:
            message = f"{most} connections of this address are open (--max-connections-per-address)"
            return busy(message, 429)
        return None

    def leave(self, transport: Any) -> None:
        address = self._addresses.pop(id(transport), None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


def _open_files(wanted: int) -> int:
    """Return how many files the process may open, of those wanted; raise the limit where it may."""
    try:
        import resource
    except ImportError:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)


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
        self._held = connections.bodies.of("")
        self._fragments = self._whole = 0  # bytes of a message that lacks its end; of those the app works on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._held = self._all.bodies.of(self.client[0] if self.client else "")

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
