"""POST /v1/responses: OpenAI's newer shape, without state, over the same chat requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from foredraft.errors import shortened
from foredraft.llm.output import Output
from foredraft.serve.blocks import Asked, Block, Step, stream_blocks
from foredraft.serve.calls import is_object
from foredraft.serve.generations import Generation
from foredraft.serve.problems import Problem
from foredraft.serve.requests import Body, Items
from foredraft.serve.tools import Function

__all__ = ["NUMBERED", "ResponsesRequest", "chat_body", "error_event", "events", "whole"]

NUMBERED = True  # events have a running number


HARMLESS = frozenset(
    "store user service_tier reasoning max_tool_calls"
    " prompt_cache_key prompt_cache_retention safety_identifier stream_options".split()
)
LOGPROBS = "message.output_text.logprobs"  # of `include`; its other values name what no reply has here
# Fields of the request that the response repeats; some with what holds where the request has none.
REPEATED = ("instructions", "temperature", "top_p", "max_output_tokens")
REPEATED_OR: dict[str, Any] = {
    "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled",
}  # fmt: skip
# Why a text ends that is not whole -> reason of the API.
CUT = {"length": "max_output_tokens", "constraint": "content_filter"}
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
TEXTS = ("input_text", "output_text")  # types of parts
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False), "prompt": (None,),
    "messages": (None,), "max_tokens": (None,), "response_format": (None,), "n": (None, 1),
    "logprobs": (None, False), "top_logprobs": (None, 0), "provenance": (None, False),
}  # fmt: skip


class Tool(Function):
    """A function that the client runs."""

    type: Literal["function"]


class NamedChoice(BaseModel):
    """The one function to call."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    name: str


class ResponsesRequest(Body):
    """The body of POST /v1/responses; fields of chat completions and of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
    model: str
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: Items[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the same request to POST /v1/chat/completions.

    Raises:
        Problem: The body is wrong, or asks for what is not supported.
    """
    request = ResponsesRequest.read(body)
    request.refuse_unsupported()
    if LOGPROBS in (request.include or ()):
        raise Problem(400, f"{LOGPROBS} cannot be included", param="include", code="unsupported_parameter")
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages: list[dict[str, Any]] = []
    for each in given:
        _add(messages, each)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    form = (request.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools or ()
    ]
    choice: Any = request.tool_choice
    if isinstance(choice, NamedChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return {
        **request.further,
        "model": request.model, "messages": messages, "max_tokens": request.max_output_tokens,
        "stream": request.stream, "response_format": form, "tools": tools, "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "truncate_prompt": "left" if request.truncation == "auto" else None,
    }  # fmt: skip


def _add(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item of the input to the chat messages; a text and the calls after it are one message."""
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1].get("role") == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        text = _texts(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "message":
        messages.append({"role": item.get("role"), "content": _texts(item.get("content"))})
    else:
        raise Problem(400, f"input items of type {shortened(kind)} are not supported", param="input")


def _texts(content: Any) -> Any:
    """Return content with the parts of chat completions in place of this API's."""
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in TEXTS else part
            for part in content
        ]
    return content


def error_event(problem: Problem) -> tuple[str, dict[str, Any]]:
    return "error", {"message": problem.message, "code": problem.code, "param": problem.param}


def whole(asked: Asked, output: Output | None = None, blocks: list[Block] | None = None) -> dict[str, Any]:
    """Return a response: whole, or as it is at the beginning of a stream."""
    body = asked.body
    made: dict[str, Any] = {
        "id": f"resp_{asked.id}", "object": "response", "created_at": int(asked.created),
        "model": asked.model, "error": None, "incomplete_details": None,
        **{name: body.get(name) for name in REPEATED},
        **{name: off if body.get(name) is None else body[name] for name, off in REPEATED_OR.items()},
    }  # fmt: skip
    if output is None:
        return made | {"status": "in_progress", "output": [], "usage": None}
    new, status = len(output.token_ids), _status(output)
    usage = {
        "input_tokens": asked.prompt_tokens, "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": new, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": asked.prompt_tokens + new,
    }  # fmt: skip
    last = len(blocks or ()) - 1
    return made | {
        "status": status,
        "incomplete_details": {"reason": CUT[output.finish_reason]} if status == "incomplete" else None,
        "output": [
            _item(asked.id, block, _block_status(block, output if place == last else None))
            for place, block in enumerate(blocks or ())
        ],
        "usage": usage,
    }


def _status(output: Output) -> Status:
    return "incomplete" if output.finish_reason in CUT else "completed"


def _block_status(block: Block, output: Output | None) -> Status:
    """Return how a block ended; the one that was open at the end of the output may be cut."""
    whole_call = block.call is not None and is_object(block.text)
    return "completed" if output is None or whole_call else _status(output)


def _item(id: str, block: Block, status: Status) -> dict[str, Any]:
    """Return a block as an item of the output; without content while it is in progress."""
    begun = status == "in_progress"
    if block.call is not None:
        call = block.call
        return {
            "id": _item_id(id, block), "type": "function_call", "status": status, "call_id": call.id,
            "name": call.name, "arguments": "" if begun else block.text,
        }  # fmt: skip
    content = [] if begun else [_part(block.text)]
    return {
        "id": _item_id(id, block), "type": "message", "role": "assistant", "status": status,
        "content": content,
    }  # fmt: skip


def _item_id(id: str, block: Block) -> str:
    return f"msg_{id}_{block.index}" if block.call is None else f"fc_{block.call.id}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def events(
    asked: Asked, generation: Generation, heartbeat: float | None
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield the events of a stream, each with its name; the name "ping" is a heartbeat.

    Raises:
        Problem: The request failed while it ran.
    """
    begun = {"response": whole(asked)}
    yield "response.created", begun
    yield "response.in_progress", begun
    blocks: list[Block] = []
    async for step in stream_blocks(generation, heartbeat):
        if step.kind == "end":
            ended = whole(asked, step.output, blocks)
            yield f"response.{ended['status']}", {"response": ended}
        elif step.block is None:
            yield "ping", {}
        else:
            if step.kind == "open":
                blocks.append(step.block)
            for event in _block_events(asked.id, step, step.block):
                yield event


def _block_events(id: str, step: Step, block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one step of a block."""
    kind, text, output = step.kind, step.text, {"output_index": block.index}
    place = {"item_id": _item_id(id, block), **output}
    if block.call is None:
        place["content_index"] = 0
    if kind == "open":
        yield "response.output_item.added", {**output, "item": _item(id, block, "in_progress")}
        if block.call is None:
            yield "response.content_part.added", {**place, "part": _part("")}
    elif kind == "delta" and block.call is None:
        yield "response.output_text.delta", {**place, "delta": text, "logprobs": []}
    elif kind == "delta":
        yield "response.function_call_arguments.delta", {**place, "delta": text}
    else:
        status = _block_status(block, step.output)
        if block.call is None:
            yield "response.output_text.done", {**place, "text": block.text, "logprobs": []}
            yield "response.content_part.done", {**place, "part": _part(block.text)}
        elif status == "completed":
            done = {**place, "name": block.call.name, "arguments": block.text}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {**output, "item": _item(id, block, status)}
