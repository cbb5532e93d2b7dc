"""The routes that answer with texts, and the least body of each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import httpx

from tests.support.serving import Served, events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGE = "/v1/responses", "/v1/messages"
PROMPT = "def add(a, b):"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 12}, TEXT: {"prompt": PROMPT, "max_tokens": 12},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 12}, MESSAGE: {"messages": MESSAGES, "max_tokens": 12},
}  # fmt: skip


def post(served: Served, path: str, **fields: Any) -> httpx.Response:
    """Send a greedy request, with JSON that may hold lone surrogates."""
    body = {"model": "demo", "temperature": 0, **NEEDED[path], **fields}
    return served.client.post(path, content=json.dumps(body))


def record(**properties: Any) -> dict[str, Any]:
    closed = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def joined(parts: Iterable[Any]) -> Any:
    """Return what the parts of a stream say together: texts and lists one after the other, of all else the last."""
    told = [part for part in parts if part is not None]
    if told and isinstance(told[0], dict):
        names = dict.fromkeys(name for part in told for name in part)
        return {name: joined(part.get(name) for part in told) for name in names}
    return reduce(add, told) if told and isinstance(told[0], str | list) else next(reversed(told), None)


def whole_and_streamed(served: Served, path: str, **fields: Any) -> list[tuple[Any, list[Any]]]:
    """Return the choices of a whole reply, each with its parts in a stream, which together are the same."""
    fields = {"seed": 1, **fields}
    reply = post(served, path, **fields)
    assert reply.status_code == 200, reply.text
    events = events_of(post(served, path, **fields, stream=True).text)
    found = [(choice, _parts(events, choice["index"])) for choice in reply.json()["choices"]]
    for choice, parts in found:
        said = joined(parts)
        if path == CHAT:
            said["message"] = said.pop("delta") | {"refusal": None}
        assert said == choice
    return found


def _parts(events: list[dict[str, Any]], index: int) -> list[Any]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]
