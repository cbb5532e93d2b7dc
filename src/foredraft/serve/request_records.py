"""Records: what happened to one request, for the log, the traces and the metrics.

The record of the running request is in a context variable, which tasks and worker threads inherit.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.llm.output import Output

__all__ = ["Recording", "RequestRecord", "current"]

GIVEN_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces, so that a log line stays one line
PROBES = ("/health", "/ready", "/metrics")
# HTTP status -> why a request was refused, where nothing more exact is known.
REFUSALS = {
    400: "invalid", 401: "api key", 403: "origin", 404: "not found", 405: "method", 413: "body too large",
    503: "not ready",
}  # fmt: skip

_current: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


@dataclass(slots=True)
class RequestRecord:
    """One request.

    Attributes:
        method: Of HTTP; WEBSOCKET for a socket and for each request over it.
        path: Without the query.
        headers: That the client sent.
        id: The client's `x-request-id` if it is printable ASCII of at most 128 characters, else `own_id`.
        own_id: A fresh id; the reply's is made of it.
        size: Bytes of the body, or characters of the frame.
        status: Of HTTP; 0 until it is known.
        key: Name of the API key; "" where none is asked for.
        address: Of the client; "" where it is not known.
        operation: "chat" or "text_completion"; "" where nothing is generated.
        requested: Fields of the request that traces show.
        model: Name of the model that answers.
        prompt_tokens: Tokens of all prompts as they are read.
        cached_tokens: Those of them that were not read again.
        tokens: New tokens of all samples.
        finish_reasons: Why the samples ended.
        reason: Why the request was refused, dropped or cancelled.
        started: Monotonic clock, in seconds: the request's arrival.
        first_token: The same clock at the first token of any sample.
        wall: Wall clock of the arrival, in nanoseconds.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = ""
    own_id: str = field(default_factory=lambda: secrets.token_hex(12))
    size: int = 0
    status: int = 0
    key: str = ""
    address: str = ""
    operation: str = ""
    requested: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    reason: str | None = None
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    wall: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        if not self.id:
            given = self.headers.get("x-request-id", "")
            self.id = given if GIVEN_ID.fullmatch(given) else self.own_id

    def begin(self) -> None:
        """Make it the record of this task, and of all tasks and threads that the task starts."""
        _current.set(self)

    def finished(self, output: Output) -> None:
        """Add a sample that has finished."""
        self.cached_tokens += output.cached_tokens
        self.finish_reasons.append(output.finish_reason)
        if output.finish_reason == "error":
            self.reason = self.reason or "generation failed"

    @property
    def refusal(self) -> str | None:
        """Return why the request was refused, by its status; None where it was not, or more is known."""
        return None if self.reason is not None else REFUSALS.get(self.status)

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


def current() -> RequestRecord:
    """Return the record of the running request; outside of requests, a record that nothing reads."""
    return _current.get() or RequestRecord("", "")


def current_id() -> str | None:
    """Return the id of the running request; None outside of requests."""
    record = _current.get()
    return None if record is None else record.id


class Recording:
    """ASGI middleware that keeps a record of every request and WebSocket, and gives every response its id.

    Args:
        app: The app.
        end: Takes the record of each request that is over, except of probes that succeeded.
    """

    def __init__(self, app: ASGIApp, end: Callable[[RequestRecord], None]) -> None:
        self._app, self._end = app, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope.get("method", "WEBSOCKET"), scope["path"], Headers(scope=scope))
        record.address = str((scope.get("client") or ("",))[0])
        record.begin()

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            elif message["type"] == "websocket.accept":
                record.status = 101
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            elif message["type"] == "websocket.close" and not record.status:
                record.status = 403  # what a server answers to a handshake that is refused
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            record.status, record.reason = record.status or 500, "defect"
            raise
        finally:
            if record.path not in PROBES or record.status >= 400:
                self._end(record)
