"""POST /v1/messages: the shape of Anthropic's API, over the same chat requests.

Fields that this API shares with chat completions mean the same. What it has beyond text (tools, images,
thinking) is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from foredraft.llm.output import Output, Piece
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Problem, check_output
from foredraft.serve.requests import Body

__all__ = ["NUMBERED", "MessagesRequest", "chat_body", "error_body", "error_event", "events", "whole"]

NUMBERED = False  # events have no running number

REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "constraint": "refusal"}
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


# Fields of this API that have no meaning here, or no support.
HARMLESS = frozenset("metadata service_tier container inference_geo".split())
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []), "tool_choice": (None,), "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []), "stop": (None,), "n": (None, 1), "logprobs": (None, False),
    "provenance": (None, False), "max_completion_tokens": (None,),
}  # fmt: skip


class MessagesRequest(Body):
    """The body of POST /v1/messages; fields of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
    model: str
    max_tokens: int
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the same request to POST /v1/chat/completions.

    Raises:
        Problem: The body is wrong, or asks for what is not supported.
    """
    request = MessagesRequest.read(body)
    request.refuse_unsupported()
    messages = list(request.messages)
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    return {
        **request.further,
        "model": request.model, "max_tokens": request.max_tokens, "messages": messages,
        "stream": request.stream, "stop": request.stop_sequences,
    }  # fmt: skip


def error_body(problem: Problem) -> dict[str, Any]:
    """Return a problem in the shape of this API."""
    default = "invalid_request_error" if problem.status < 500 else "overloaded_error"
    kind = "api_error" if problem.status == 500 else KINDS.get(problem.status, default)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: Problem) -> tuple[str, dict[str, Any]]:
    return "error", error_body(problem)


def whole(id: str, model: str, output: Output | None, prompt_tokens: int) -> dict[str, Any]:
    """Return a message: whole, or empty at the beginning of a stream."""
    content = [] if output is None else [{"type": "text", "text": output.text or ""}]
    new, cached = (0, 0) if output is None else (len(output.token_ids), output.cached_tokens)
    return {
        "id": id, "type": "message", "role": "assistant", "model": model, "content": content,
        **_end(output),
        "usage": {"input_tokens": prompt_tokens, "output_tokens": new, "cache_read_input_tokens": cached},
    }  # fmt: skip


def _end(output: Output | None) -> dict[str, Any]:
    if output is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = REASONS.get(output.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": output.stopped_by if reason == "stop_sequence" else None}


async def events(
    id: str, model: str, generation: Generation, heartbeat: float | None
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream, each with its name.

    Raises:
        Problem: The request failed while it ran.
    """
    yield "message_start", {"message": whole(id, model, None, generation.prompt_tokens)}
    yield "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
    output: Output | None = None
    async for taken in generation.pieces(heartbeat):
        pieces: list[Piece] = [piece for _, piece in taken]
        if not pieces:
            yield "ping", {}
            continue
        if text := "".join(piece.text or "" for piece in pieces):
            yield "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}
        output = pieces[-1].output
    assert output is not None
    check_output(output)
    yield "content_block_stop", {"index": 0}
    yield "message_delta", {"delta": _end(output), "usage": {"output_tokens": len(output.token_ids)}}
    yield "message_stop", {}
