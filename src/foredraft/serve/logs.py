"""Logs: one line for each request that is over, and warnings, as text or as JSON objects.

No line holds a prompt, a text or an API key; `--log-prompts` adds prompts, as token ids.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foredraft.serve.records import Record, current_id
from foredraft.serve.settings import Settings

__all__ = ["log_access", "to_stderr"]

access = logging.getLogger("foredraft.serve.access")


def log_access(record: Record) -> None:
    """Write the line of a request that is over."""
    if not access.isEnabledFor(logging.INFO):
        return
    first = record.seconds_to_first_token
    fields: dict[str, Any] = {
        "request_id": record.id, "method": record.method, "path": record.path, "status": record.status,
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


@contextmanager
def to_stderr(settings: Settings) -> Iterator[None]:
    """Write all logs of the process to the standard error stream until the block ends."""
    handler = logging.StreamHandler(sys.stderr)
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
        for logger, level in old.items():
            logger.setLevel(level)
