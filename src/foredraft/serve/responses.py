"""POST /v1/responses: OpenAI's newer shape, without state, over the same chat requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from foredraft.llm.output import Output
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Problem, check_output
from foredraft.serve.requests import Body

__all__ = ["NUMBERED", "ResponsesRequest", "chat_body", "error_event", "events", "whole"]

NUMBERED = True  # events have a running number


HARMLESS = frozenset(
    "metadata store user service_tier include truncation reasoning parallel_tool_calls max_tool_calls"
    " prompt_cache_key prompt_cache_retention safety_identifier stream_options".split()
)
TEXTS = ("input_text", "output_text")  # types of parts
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None, "auto", "none"), "previous_response_id": (None,),
    "conversation": (None,), "background": (None, False), "prompt": (None,),
    "messages": (None,), "max_tokens": (None,), "response_format": (None,), "n": (None, 1),
    "logprobs": (None, False), "top_logprobs": (None, 0), "provenance": (None, False),
}  # fmt: skip


class ResponsesRequest(Body):
    """The body of POST /v1/responses; fields of chat completions and of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the same request to POST /v1/chat/completions.

    Raises:
        Problem: The body is wrong, or asks for what is not supported.
    """
    request = ResponsesRequest.read(body)
    request.refuse_unsupported()
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages = [_message(each) for each in given]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    form = (request.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    return {
        **request.further,
        "model": request.model, "messages": messages, "max_tokens": request.max_output_tokens,
        "stream": request.stream, "response_format": form,
    }  # fmt: skip


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the input as a chat message."""
    if item.get("type", "message") != "message":
        raise Problem(400, f"input items of type {item.get('type')!r} are not supported", param="input")
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in TEXTS else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


def error_event(problem: Problem) -> tuple[str, dict[str, Any]]:
    return "error", {"message": problem.message, "code": problem.code, "param": problem.param}


def whole(
    id: str, model: str, output: Output | None, prompt_tokens: int, created: float | None = None
) -> dict[str, Any]:
    """Return a response: whole, or as it is at the beginning of a stream; created: when, now if None."""
    made: dict[str, Any] = {
        "id": f"resp_{id}", "object": "response", "created_at": int(created or time.time()), "model": model,
        "error": None, "instructions": None, "metadata": {}, "parallel_tool_calls": False,
        "tool_choice": "none", "tools": [], "temperature": None, "top_p": None, "incomplete_details": None,
    }  # fmt: skip
    if output is None:
        return made | {"status": "in_progress", "output": [], "usage": None}
    new = len(output.token_ids)
    cut = {"length": "max_output_tokens", "constraint": "content_filter"}.get(output.finish_reason)
    usage = {
        "input_tokens": prompt_tokens, "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": new, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + new,
    }  # fmt: skip
    return made | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": cut} if cut else None,
        "output": [_item(id, output.text or "", "incomplete" if cut else "completed")],
        "usage": usage,
    }


def _item(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def events(
    id: str, model: str, generation: Generation, heartbeat: float | None
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream, each with its name; the name "ping" is a heartbeat.

    Raises:
        Problem: The request failed while it ran.
    """
    created, tokens = time.time(), generation.prompt_tokens
    begun = {"response": whole(id, model, None, tokens, created)}
    place = {"item_id": f"msg_{id}", "output_index": 0, "content_index": 0}
    yield "response.created", begun
    yield "response.in_progress", begun
    yield "response.output_item.added", {"output_index": 0, "item": _item(id, None, "in_progress")}
    yield "response.content_part.added", {**place, "part": _part("")}
    output: Output | None = None
    async for taken in generation.pieces(heartbeat):
        if not taken:
            yield "ping", {}
            continue
        if text := "".join(piece.text or "" for _, piece in taken):
            yield "response.output_text.delta", {**place, "delta": text, "logprobs": []}
        output = taken[-1][1].output
    assert output is not None
    check_output(output)
    ended = whole(id, model, output, tokens, created)
    text = output.text or ""
    yield "response.output_text.done", {**place, "text": text, "logprobs": []}
    yield "response.content_part.done", {**place, "part": _part(text)}
    yield "response.output_item.done", {"output_index": 0, "item": ended["output"][0]}
    yield (
        ("response.incomplete" if ended["status"] == "incomplete" else "response.completed"),
        {"response": ended},
    )
