"""POST /v1/messages: the shape of Anthropic's API, over the same chat requests.

What this API has beyond text and tools, such as images, is refused by name; tools that Anthropic's servers
run are left out. A client that asks for more tokens than there is room for, as most do, gets as many as there
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from foredraft.serve import reply_types
from foredraft.serve.blocks import BlockEvent, ContentBlock
from foredraft.serve.calls import parsed_object
from foredraft.serve.conversation import REASONING, text_of
from foredraft.serve.fields import NOT_OF_MESSAGES, OF_MESSAGES, Body, Items
from foredraft.serve.problems import TYPES, LengthFields, Problem, TooLong
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.reply_types import StopReason
from foredraft.serve.requests import ChatRequest
from foredraft.serve.responses import kind_of

# Why the library ends a text -> stop_reason of this API.
REASONS: dict[str, StopReason] = {
    "eos": "end_turn", "stop": "stop_sequence", "length": "max_tokens", "constraint": "refusal",
}  # fmt: skip
KINDS = TYPES | {413: "request_too_large", 500: "api_error"}
BILLING = "x-anthropic-billing-header:"
THINKS = {"enabled": True, "disabled": False}  # "adaptive" leaves it to the model


class Tool(BaseModel, extra="ignore", strict=True):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ServerTool(BaseModel, extra="ignore", strict=True):
    """A tool that Anthropic's servers run or describe, such as a search of the web."""

    type: str
    name: str | None = None


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[ServerTool, Tag("server")],
    Discriminator(lambda tool: "own" if kind_of(tool) in (None, "custom") else "server"),
]


class ToolChoice(BaseModel, extra="forbid", strict=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel, extra="forbid", strict=True):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel, extra="ignore", strict=True):
    """The form of the text, in its newer place; the effort and what is newer still changes nothing here."""

    format: OutputFormat | None = None


class Thinking(BaseModel, extra="ignore", strict=True):
    """Whether the model reasons first, where it can."""

    type: Literal["enabled", "disabled", "adaptive"]


class MessagesRequest(Body):
    """The body of POST /v1/messages; fields of the library's own may be added."""

    harmless, unsupported = OF_MESSAGES, NOT_OF_MESSAGES
    model: str | None = None
    max_tokens: int
    messages: Items[dict[str, Any]]
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    stream: bool | None = None

    def chat(self) -> ChatRequest:
        self.refuse_unsupported()
        messages = [made for each in self.messages for made in _messages(each)]
        if system := _told(self.system):
            messages.insert(0, {"role": "system", "content": system})
        last = messages[-1] if messages else {}
        choice, given = self.tool_choice or ToolChoice(type="auto"), self.tools or []
        named = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {
                "name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            for tool in given if isinstance(tool, Tool)
        ]  # fmt: skip
        form = self.output_format or (self.output_config and self.output_config.format)
        schema = {"json_schema": {"schema": form.schema_, "strict": True}} if form else {}
        body = {
            **self.further,
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type),
            **({"response_format": {"type": "json_schema", **schema}} if form else {}),
            "model": self.model, "max_tokens": self.max_tokens, "messages": messages, "stream": self.stream,
            "stop": self.stop_sequences, "n": 1,
            "continue_final_message": last.get("role") == "assistant" and not last.get("tool_calls"),
        }  # fmt: skip
        thinks = None if self.thinking is None else THINKS.get(self.thinking.type)
        ignored = dict.fromkeys(each.name or each.type for each in given if isinstance(each, ServerTool))
        return ChatRequest.of(body, ignored, thinks, cuts=True)


class CountTokensRequest(MessagesRequest):
    """The body of POST /v1/messages/count_tokens."""

    max_tokens: int = 1


def _told(system: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
    """Return the system message without the block that changes with each request of Claude Code's."""
    if not isinstance(system, list):
        return system
    return [block for block in system if not str(block.get("text")).startswith(BILLING)]


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat messages: results of tools become messages of their own, in front."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    results, calls, texts, thoughts = [], [], [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_result":
            text = text_of(part.get("content") or "", "the content of a tool_result", "messages")
            text = f"Error: {text}" if part.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": text})
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind != "redacted_thinking":  # which only Anthropic's servers can read
            texts.append(part)  # chat completions refuse what is no text
    if results and not texts and not calls:
        return results
    kept = {"role": message.get("role"), "content": texts, "tool_calls": calls or None}
    reasoning = {REASONING: "\n".join(thoughts)} if any(thoughts) else {}
    return [*results, kept | reasoning]


def error_body(problem: Problem) -> dict[str, Any]:
    default = "invalid_request_error" if problem.status < 500 else "overloaded_error"
    message = problem.for_messages if isinstance(problem, TooLong) else problem.message
    return {"type": "error", "error": {"type": KINDS.get(problem.status, default), "message": message}}


class MessageReply(BlockReply):
    request, types = MessagesRequest, (reply_types.Message, reply_types.MessageEvent)
    route = "answer_messages"
    lengths = LengthFields("messages")
    errors = (reply_types.MessageError, reply_types.Error)  # the second one before the route is reached
    begins_late = True  # `message_start` counts the cached tokens

    @staticmethod
    def failure(problem: Problem) -> Event:
        return error_body(problem)

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.state()}
        yield from super().begin()

    def step(self, step: BlockEvent) -> Iterator[Event]:
        block, place = step.block, {"index": step.block.index}
        if step.kind == "open":
            yield {"type": "content_block_start", **place, "content_block": self._block(block, begun=True)}
            return
        names = ("input_json_delta", "partial_json") if block.call is not None else ("text_delta", "text")
        kind, name = ("thinking_delta", "thinking") if block.thinking else names
        delta = {"type": kind, name: step.text}
        if step.kind == "close" and block.thinking:
            delta = {"type": "signature_delta", "signature": self.id}
        if step.kind == "delta" or block.thinking:
            yield {"type": "content_block_delta", **place, "delta": delta}
        if step.kind == "close":
            yield {"type": "content_block_stop", **place}

    def end(self) -> Iterator[Event]:
        state = self.state()
        delta = {name: state[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": state["usage"]}
        yield {"type": "message_stop"}

    def state(self) -> dict[str, Any]:
        output, blocks = self.sample.output, self.sample.blocks
        new, stop, stopped_by = 0, None, None
        cached = self.generation.handles[0].cached_tokens
        if output is not None:
            new = self.sample.tokens
            stop = REASONS.get(output.finish_reason, "end_turn")
            if stop == "end_turn" and blocks.calls:
                stop = "tool_use"
            stopped_by = output.stopped_by if stop == "stop_sequence" else None
        usage = {  # in this API, tokens that came from a cache do not count as input
            "input_tokens": self.prompt_tokens - cached, "output_tokens": new,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        }  # fmt: skip
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": [] if output is None else [self._block(block) for block in blocks.all],
            "stop_reason": stop, "stop_sequence": stopped_by, "usage": usage,
        }  # fmt: skip

    def _block(self, block: ContentBlock, *, begun: bool = False) -> Event:
        text = "" if begun else block.text
        if block.thinking:
            return {"type": "thinking", "thinking": text, "signature": "" if begun else self.id}
        if block.call is None:
            return {"type": "text", "text": text}
        given = {} if begun else parsed_object(block.text)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
