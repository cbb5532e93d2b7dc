"""POST /v1/messages: the shape of Anthropic's API, over the same chat requests.

Fields that this API shares with chat completions mean the same. What it has beyond text and tools (images,
thinking) is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foredraft.llm.output import Output
from foredraft.serve.blocks import Asked, Block, stream_blocks
from foredraft.serve.calls import parsed_object
from foredraft.serve.conversation import text_of
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Problem
from foredraft.serve.requests import Body, Items

__all__ = ["NUMBERED", "MessagesRequest", "chat_body", "error_body", "error_event", "events", "whole"]

NUMBERED = False  # events have no running number

REASONS = {"eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "constraint": "refusal"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


# Fields of this API that have no meaning here, or no support.
HARMLESS = frozenset("metadata service_tier container inference_geo".split())
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}), "mcp_servers": (None, []), "stop": (None,), "n": (None, 1),
    "logprobs": (None, False), "provenance": (None, False), "max_completion_tokens": (None,),
}  # fmt: skip


class Tool(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel):
    """The form of the text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """The form of the text, in its newer place."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(Body):
    """The body of POST /v1/messages; fields of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
    model: str
    max_tokens: int
    messages: Items[dict[str, Any]]
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the same request to POST /v1/chat/completions.

    Raises:
        Problem: The body is wrong, or asks for what is not supported.
    """
    request = MessagesRequest.read(body)
    request.refuse_unsupported()
    messages = [made for each in request.messages for made in _messages(each)]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    last = messages[-1] if messages else {}
    return {
        **request.further, **_tools(request), **_format(request),
        "model": request.model, "max_tokens": request.max_tokens, "messages": messages,
        "stream": request.stream, "stop": request.stop_sequences,
        "continue_final_message": last.get("role") == "assistant" and not last.get("tool_calls"),
    }  # fmt: skip


def _format(request: MessagesRequest) -> dict[str, Any]:
    """Return the field of chat completions for the form of the text, if it has one."""
    form = request.output_format or (request.output_config and request.output_config.format)
    schema = {"json_schema": {"schema": form.schema_}} if form else {}
    return {"response_format": {"type": "json_schema", **schema}} if form else {}


def _tools(request: MessagesRequest) -> dict[str, Any]:
    """Return the fields of chat completions for a request's tools."""
    choice = request.tool_choice or ToolChoice(type="auto")
    named = {"type": "function", "function": {"name": choice.name}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.input_schema
            },
        }
        for tool in request.tools or ()
    ]  # fmt: skip
    return {
        "tools": tools, "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
    }  # fmt: skip


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat messages: results of tools become messages of their own, in front."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    results, calls, texts = [], [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            text = text_of(part.get("content") or "", "the content of a tool_result", "messages")
            text = f"Error: {text}" if part.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        else:
            texts.append(part)  # chat completions refuse what is no text
    if results and not texts and not calls:
        return results
    kept = {"role": message.get("role"), "content": texts, "tool_calls": calls or None}
    return [*results, kept]


def error_body(problem: Problem) -> dict[str, Any]:
    """Return a problem in the shape of this API."""
    default = "invalid_request_error" if problem.status < 500 else "overloaded_error"
    kind = "api_error" if problem.status == 500 else KINDS.get(problem.status, default)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: Problem) -> tuple[str, dict[str, Any]]:
    return "error", error_body(problem)


def whole(asked: Asked, output: Output | None = None, blocks: list[Block] | None = None) -> dict[str, Any]:
    """Return a message: whole, or empty at the beginning of a stream."""
    return {
        "id": asked.id, "type": "message", "role": "assistant", "model": asked.model,
        "content": [_block(block) for block in blocks or ()],
        **_end(output, called=any(block.call for block in blocks or ())),
        "usage": _usage(asked, output),
    }  # fmt: skip


def _usage(asked: Asked, output: Output | None) -> dict[str, int]:
    """Return the tokens; in this API those that came from a cache do not count as input."""
    new, cached = (0, 0) if output is None else (len(output.token_ids), output.cached_tokens)
    return {
        "input_tokens": asked.prompt_tokens - cached, "output_tokens": new,
        "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
    }  # fmt: skip


def _block(block: Block, *, begun: bool = False) -> dict[str, Any]:
    """Return a block of content, empty where it has only begun."""
    if block.call is None:
        return {"type": "text", "text": "" if begun else block.text}
    given = {} if begun else parsed_object(block.text)
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}


def _end(output: Output | None, *, called: bool = False) -> dict[str, Any]:
    if output is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = REASONS.get(output.finish_reason, "end_turn")
    stopped = output.stopped_by if reason == "stop_sequence" else None
    if called and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stopped}


async def events(
    asked: Asked, generation: Generation, heartbeat: float | None
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream, each with its name.

    Raises:
        Problem: The request failed while it ran.
    """
    yield "message_start", {"message": whole(asked)}
    called = False
    async for step in stream_blocks(generation, heartbeat):
        block = step.block
        if step.kind == "end":
            delta = _end(step.output, called=called)
            yield "message_delta", {"delta": delta, "usage": _usage(asked, step.output)}
        elif block is None:
            yield "ping", {}
        elif step.kind == "open":
            called = called or block.call is not None
            yield "content_block_start", {"index": block.index, "content_block": _block(block, begun=True)}
        elif step.kind == "delta":
            kind, name = (
                ("text_delta", "text") if block.call is None else ("input_json_delta", "partial_json")
            )
            yield "content_block_delta", {"index": block.index, "delta": {"type": kind, name: step.text}}
        else:
            yield "content_block_stop", {"index": block.index}
    yield "message_stop", {}
