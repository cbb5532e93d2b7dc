"""Logs: one line for each request that is over, and warnings, as text or as JSON objects.

No line holds a prompt, a text or an API key; `--log-prompts` adds prompts, as token ids.

A thread of its own writes the lines, because the other end of the standard error stream may not be read. What
does not fit into its queue meanwhile is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from foredraft.serve.request_records import RequestRecord, current_id
from foredraft.serve.settings import Settings

__all__ = ["log_access", "to_stderr"]

access = logging.getLogger("foredraft.serve.access")
MAX_HELD = 4 << 20  # characters of lines that wait to be written: thousands of requests
MAX_PATH = 200  # characters of a path in a line
FLUSH_SECONDS = 1.0  # for which the end waits where the stream takes nothing


def log_access(record: RequestRecord) -> None:
    """Write the line of a request that is over."""
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
    """Formats a record as one line.

    Args:
        as_json: As a JSON object.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if (id := current_id()) is not None:
            fields.setdefault("request_id", id)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        message = record.getMessage()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        if self._as_json:
            head = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": message}
            return json.dumps(head | fields, default=str)
        traceback = fields.pop("traceback", None)
        shown = " ".join(f"{name}={_word(value)}" for name, value in fields.items())
        line = f"{at} {record.levelname.lower()} {' '.join(message.split())} {shown}".rstrip()
        return line if traceback is None else f"{line}\n{traceback}"


def _word(value: Any) -> str:
    """Return a value as one word: quoted where it has spaces."""
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


class Writer(logging.Handler):
    """Writes lines in a thread of its own; a stream that takes nothing stops that thread alone.

    Args:
        stream: Where the lines go.

    Attributes:
        dropped: Lines that found no room and are not yet reported.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque()
        self._held = 0  # characters of all lines that wait or are being written
        self._news = threading.Condition()
        self._closed = False
        self.dropped = 0
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
        """Wait until all lines are written, or nothing has moved for a while."""
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
                _write(self._stream, line)
            with self._news:
                self._held -= len(line)
                if dropped and not self._lines:  # what fitted is written: say what did not
                    text = f"{dropped} lines of the log were dropped: the standard error stream was not read"
                    self.dropped -= dropped
                    line = self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (), None))
                    self._lines.append(line + "\n")
                    self._held += len(line) + 1
                self._news.notify_all()


def _write(stream: TextIO, text: str) -> None:
    """Write to the file itself: a thread stuck in a buffer of Python's would abort the end of the process."""
    try:
        file = stream.fileno()
    except (OSError, ValueError, AttributeError):  # a stream in memory
        stream.write(text)
        stream.flush()
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
