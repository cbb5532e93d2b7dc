"""Records of requests, and logs: one line for each request that is over, and warnings, as text or as JSON.

The record of the running request is in a context variable, which tasks and worker threads inherit. No line
holds a prompt, a text or an API key; `--log-prompts` adds prompts, as token ids. A thread of its own writes
the lines, because nothing may read the standard error stream; what does not fit is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.llm.output import Output
from foredraft.serve.settings import Settings

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
    method: str  # of HTTP; WEBSOCKET for a socket and for each request over it
    path: str  # without the query
    headers: Mapping[str, str] = field(default_factory=dict)  # that the client sent
    # the client's `x-request-id` if it is printable ASCII of at most 128 characters, else `own_id`
    id: str = ""
    # a fresh id; the reply's is made of it
    own_id: str = field(default_factory=lambda: secrets.token_hex(12))
    size: int = 0  # bytes of the body, or characters of the frame
    status: int = 0  # of HTTP; 0 until it is known
    key: str = ""  # name of the API key; "" where none is asked for
    address: str = ""  # of the client; "" where it is not known
    operation: str = ""  # "chat" or "text_completion"; "" where nothing is generated
    requested: dict[str, Any] = field(default_factory=dict)  # fields of the request that traces show
    model: str = ""  # name of the model that answers
    prompt_tokens: int = 0  # tokens of all prompts as they are read
    cached_tokens: int = 0  # those of them that were not read again
    tokens: int = 0  # new tokens of all samples
    finish_reasons: list[str] = field(default_factory=list)  # why the samples ended
    reason: str | None = None  # why the request was refused, dropped or cancelled
    # monotonic clock, in seconds: the request's arrival
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None  # the same clock at the first token of any sample
    wall: int = field(default_factory=time.time_ns)  # wall clock of the arrival, in nanoseconds

    def __post_init__(self) -> None:
        if not self.id:
            given = self.headers.get("x-request-id", "")
            self.id = given if GIVEN_ID.fullmatch(given) else self.own_id

    def begin(self) -> None:
        """Make it the record of this task, and of all tasks and threads that the task starts."""
        _current.set(self)

    def finished(self, output: Output) -> None:
        self.cached_tokens += output.cached_tokens
        self.finish_reasons.append(output.finish_reason)
        if output.finish_reason == "error":
            self.reason = self.reason or "generation failed"

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.started


def current() -> RequestRecord:
    """Return the record of the running request; outside of requests, a record that nothing reads."""
    return _current.get() or RequestRecord("", "")


class Recording:
    """ASGI middleware that keeps a record of every request and WebSocket, and gives every response its id."""

    def __init__(self, app: ASGIApp, end: Callable[[RequestRecord], None]) -> None:
        self._app, self._end = app, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method, address = scope.get("method", "WEBSOCKET"), str((scope.get("client") or ("",))[0])
        record = RequestRecord(method, scope["path"], Headers(scope=scope), address=address)
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


access = logging.getLogger("foredraft.serve.access")
MAX_HELD = 4 << 20  # characters of lines that wait to be written: thousands of requests
MAX_PATH = 200  # characters of a path in a line
FLUSH_SECONDS = 1.0  # for which the end waits where the stream takes nothing


def log_access(record: RequestRecord) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    first = record.seconds_to_first_token
    fields: dict[str, Any] = {
        "request_id": record.id, "method": record.method, "path": record.path[:MAX_PATH],
        "status": record.status,
        "prompt_tokens": record.prompt_tokens or None, "tokens": record.tokens or None,
        "seconds_to_first_token": None if first is None else round(first, 6),
        "seconds": round(time.monotonic() - record.started, 6),
        "reason": record.reason, "key": record.key or None,
    }  # fmt: skip
    access.info("request", extra={"fields": {k: v for k, v in fields.items() if v is not None}})


class _Lines(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if (request := _current.get()) is not None:
            fields.setdefault("request_id", request.id)
        traceback = self.formatException(record.exc_info) if record.exc_info else None
        message = record.getMessage()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        if self._as_json:
            head = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": message}
            return json.dumps(head | fields | ({"traceback": traceback} if traceback else {}), default=str)
        words = [at, record.levelname.lower(), *message.split()]
        for name, value in fields.items():  # as one word: quoted where it has spaces
            text = str(value)
            plain = text.isprintable() and " " not in text and text
            words.append(f"{name}={text if plain else json.dumps(text)}")
        line = " ".join(words)
        return line if traceback is None else f"{line}\n{traceback}"


class Writer(logging.Handler):
    """Writes lines in a thread of its own; a stream that takes nothing stops that thread alone."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._held = 0  # characters of all lines that wait or are being written
        self._news = threading.Condition()
        self._closed = False
        self.dropped = 0  # lines that found no room and are not yet reported
        self._thread = threading.Thread(target=self._run, name="foredraft-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line, formatted by the thread that logs it, whose request the line names."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._news:
            if self._closed or (self._held and self._held + len(line) > MAX_HELD):
                self.dropped += 1
                return
            self._lines.append(line)
            self._held += len(line)
            self._news.notify_all()

    def flush(self) -> None:
        with self._news:
            while self._held and self._news.wait(FLUSH_SECONDS):
                pass

    def close(self) -> None:
        """Write what can be written, and end the thread unless the stream holds it."""
        self.flush()
        with self._news:
            self._closed = True
            self._news.notify_all()
        super().close()

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line, dropped = self._lines.popleft(), self.dropped
            with suppress(OSError, ValueError):  # the stream has ended, and nothing could say so
                self._write(line)
            with self._news:
                self._held -= len(line)
                if dropped and not self._lines:  # what fitted is written: say what did not
                    text = f"{dropped} lines of the log were dropped: the standard error stream was not read"
                    self.dropped -= dropped
                    line = self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (), None))
                    self._lines.append(line + "\n")
                    self._held += len(line) + 1
                self._news.notify_all()

    def _write(self, text: str) -> None:
        """Write to the file itself: a thread stuck in a buffer of Python's would abort the process's end."""
        try:
            file = self._stream.fileno()
        except (OSError, ValueError, AttributeError):  # a stream in memory
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode("utf-8", "backslashreplace")
        while data:
            data = data[os.write(file, data) :]


@contextmanager
def to_stderr(settings: Settings) -> Iterator[None]:
    """Write all logs of the process to the standard error stream until the block ends."""
    handler = Writer(sys.stderr)
    handler.setFormatter(_Lines(as_json=settings.log_format == "json"))
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    levels = {
        access: logging.INFO if settings.access_log else logging.WARNING,
        logging.getLogger("foredraft.serve.state"): logging.INFO if settings.log_prompts else logging.NOTSET,
    }
    old = {logger: logger.level for logger in levels}
    root.handlers[:] = [handler]
    for logger, level in levels.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:] = before
        handler.close()
        for logger, level in old.items():
            logger.setLevel(level)
