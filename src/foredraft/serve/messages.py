"""POST /v1/messages: the shape of Anthropic's API, over the same chat requests.

Fields that this API shares with chat completions mean the same. What it has beyond text and tools (images,
thinking) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from foredraft.serve.blocks import Block, Step
from foredraft.serve.conversation import text_of
from foredraft.serve.problems import Error, Problem
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.requests import Body, ChatRequest, Items
from foredraft.serve.tool_calls import parsed_object

__all__ = ["Message", "MessageError", "MessageEvent", "MessageReply", "MessagesRequest", "error_body"]

StopReason: TypeAlias = Literal["end_turn", "stop_sequence", "max_tokens", "refusal", "tool_use"]
# Why the library ends a text -> stop_reason of this API.
REASONS: dict[str, StopReason] = {
    "eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "constraint": "refusal",
}  # fmt: skip
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
    "return_token_ids": (None, False), "prompt_logprobs": (None,),
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
    model: str | None = None
    max_tokens: int
    messages: Items[dict[str, Any]]
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None


class TextBlock(TypedDict, closed=True):
    type: Literal["text"]
    text: str


class ToolUseBlock(TypedDict, closed=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict, closed=True):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class Message(TypedDict, closed=True):
    """The reply of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageErrorFields(TypedDict, closed=True):
    type: str
    message: str


class MessageError(TypedDict, closed=True):
    """An error in the shape of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorFields


class MessageEvent(TypedDict, closed=True):
    """An event of a streamed message; which of the fields it has depends on its type."""

    type: str
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[TextBlock | ToolUseBlock]
    delta: NotRequired[dict[str, str | None]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[MessageErrorFields]


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
        "stream": request.stream, "stop": request.stop_sequences, "n": 1,
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


def error_body(problem: Problem) -> MessageError:
    """Return a problem in the shape of this API."""
    default = "invalid_request_error" if problem.status < 500 else "overloaded_error"
    kind = "api_error" if problem.status == 500 else KINDS.get(problem.status, default)
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


class MessageReply(BlockReply):
    """Of POST /v1/messages."""

    request, types = MessagesRequest, (Message, MessageEvent)
    route = "answer_messages"
    errors = (MessageError, Error)  # the second one before the route is reached

    @classmethod
    def read(cls, body: dict[str, Any]) -> ChatRequest:
        return ChatRequest.read(chat_body(body))

    @staticmethod
    def failure(problem: Problem) -> MessageError:
        return error_body(problem)

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.state()}
        yield from super().begin()

    def step(self, step: Step) -> Iterator[MessageEvent]:
        index, is_text = step.block.index, step.block.call is None
        if step.kind == "open":
            block = _block(step.block, begun=True)
            yield {"type": "content_block_start", "index": index, "content_block": block}
        elif step.kind == "delta":
            kind, name = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: step.text}}
        else:
            yield {"type": "content_block_stop", "index": index}

    def end(self) -> Iterator[MessageEvent]:
        reason, stopped = self._end()
        delta = {"stop_reason": reason, "stop_sequence": stopped}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    def state(self) -> Message:
        reason, stopped = self._end()
        blocks = [] if self.sample.output is None else self.sample.blocks.all
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [_block(block) for block in blocks], "stop_reason": reason, "stop_sequence": stopped,
            "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> MessageUsage:
        """Return the tokens; in this API those that came from a cache do not count as input."""
        output = self.sample.output
        new, cached = (0, 0) if output is None else (self.sample.tokens, output.cached_tokens)
        return {
            "input_tokens": self.prompt_tokens - cached, "output_tokens": new,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        }  # fmt: skip

    def _end(self) -> tuple[StopReason | None, str | None]:
        """Return why the text ended, and the stop string that ended it; None before."""
        output = self.sample.output
        if output is None:
            return None, None
        reason = REASONS.get(output.finish_reason, "end_turn")
        if reason == "end_turn" and self.sample.blocks.calls:
            reason = "tool_use"
        return reason, output.stopped_by if reason == "stop_sequence" else None


def _block(block: Block, *, begun: bool = False) -> TextBlock | ToolUseBlock:
    """Return a block of content, empty where it has only begun."""
    if block.call is None:
        return {"type": "text", "text": "" if begun else block.text}
    given = {} if begun else parsed_object(block.text)
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
