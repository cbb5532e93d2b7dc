"""Streaming: one reply as server-sent events or as plain text. A frame is whole, whatever cuts the bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

from foredraft.serve.generations import Generation
from foredraft.serve.problems import Problem
from foredraft.serve.replies import Reply

__all__ = ["SSE_HEADERS", "as_json", "events", "frames", "named_event", "named_events", "plain_text"]

# A proxy must neither keep nor compress an event stream.
SSE_HEADERS = {
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    "Connection": "keep-alive",
}


def as_json(value: Any) -> str:
    """Return a value on one line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def frames(
    generation: Generation, reply: Reply, heartbeat: float | None
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the objects of a stream: chunks, the usage if asked for, or an error; None is a heartbeat."""
    try:
        async for taken in generation.pieces(heartbeat):
            if not taken:
                yield None
                continue
            for chunk in reply.chunks(taken, generation.prompt_tokens):
                yield chunk
        if reply.job.include_usage:
            yield reply.usage_chunk(generation.prompt_tokens)
    except Problem as problem:
        yield problem.body


async def events(objects: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    """Yield server-sent events, the last one `[DONE]`; heartbeats are comments."""
    async for each in objects:
        yield b": ping\n\n" if each is None else f"data: {as_json(each)}\n\n".encode()
    yield b"data: [DONE]\n\n"


async def named_events(
    objects: AsyncIterator[tuple[str, dict[str, Any]]],
    error: Callable[[Problem], tuple[str, dict[str, Any]]],
    *,
    numbered: bool,
) -> AsyncIterator[bytes]:
    """Yield server-sent events that have names, and numbers if asked for."""
    numbers = count()

    def made(name: str, fields: dict[str, Any]) -> bytes:
        return named_event(name, fields, next(numbers) if numbered else None)

    try:
        async for name, fields in objects:
            yield made(name, fields)
    except Problem as problem:
        yield made(*error(problem))


def named_event(name: str, fields: dict[str, Any], number: int | None) -> bytes:
    """Return one server-sent event that has a name, and a number unless it is None."""
    numbered = {} if number is None else {"sequence_number": number}
    return f"event: {name}\ndata: {as_json({'type': name, **fields, **numbered})}\n\n".encode()


async def plain_text(objects: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    """Yield the text of the first choice as it comes; an error ends it with a line of its own."""
    async for each in objects:
        if each is None:
            continue
        if "error" in each:
            yield f"\nerror: {each['error']['message']}\n".encode()
        for choice in each.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            if choice["index"] == 0 and text:
                yield text.encode()
