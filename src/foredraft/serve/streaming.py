"""Streaming: events as server-sent events or as plain text. A frame is whole, whatever cuts the bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from foredraft.serve.replies import Event

__all__ = ["SSE_HEADERS", "as_json", "plain_text", "server_sent"]

# A proxy must neither keep nor compress an event stream.
SSE_HEADERS = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    "Connection": "keep-alive",
}


def as_json(value: Any) -> str:
    """Return a value on one line of JSON."""
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
