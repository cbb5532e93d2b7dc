"""POST /v1/messages: the shape of Anthropic's API, over the same chat requests.

What this API has beyond text and tools, such as images, is refused by name; tools that Anthropic's servers
run are left out. A client that asks for more tokens than there is room for, as most do, gets as many as there
is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from foredraft.serve.blocks import BlockEvent, ContentBlock
from foredraft.serve.conversation import REASONING, text_of
from foredraft.serve.problems import Error, LengthFields, Problem, TooLong
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.requests import Body, ChatRequest, Further, Items
from foredraft.serve.tool_calls import parsed_object

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
HARMLESS = frozenset("metadata service_tier container inference_geo cache_control".split())
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "mcp_servers": (None, []), "stop": (None,), "n": (None, 1),
    "logprobs": (None, False), "provenance": (None, False), "max_completion_tokens": (None,),
    "return_token_ids": (None, False), "prompt_logprobs": (None,),
}  # fmt: skip
THINKS = {"enabled": True, "disabled": False}  # "adaptive" leaves it to the model


class Tool(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ServerTool(BaseModel):
    """A tool that Anthropic's servers run or describe, such as a search of the web."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: str
    name: str | None = None


def _kind_of_tool(tool: Any) -> Literal["own", "server"]:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "own" if kind in (None, "custom") else "server"


AnyTool = Annotated[
    Annotated[Tool, Tag("own")] | Annotated[ServerTool, Tag("server")], Discriminator(_kind_of_tool)
]


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
    """The form of the text, in its newer place; the effort and what is newer still changes nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)
    format: OutputFormat | None = None


class Thinking(BaseModel):
    """Whether the model reasons first, where it can."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["enabled", "disabled", "adaptive"]


class MessagesRequest(Body):
    """The body of POST /v1/messages; fields of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
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


class CountTokensRequest(MessagesRequest):
    """The body of POST /v1/messages/count_tokens."""

    max_tokens: int = 1


class TextBlock(TypedDict, closed=True):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict, closed=True):
    """The reasoning; clients send it back with its signature, which says which reply it is of."""

    type: Literal["thinking"]
    thinking: str
    signature: str


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
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
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
    content_block: NotRequired[TextBlock | ThinkingBlock | ToolUseBlock]
    delta: NotRequired[dict[str, str | None]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[MessageErrorFields]


def chat_request(request: MessagesRequest) -> ChatRequest:
    request.refuse_unsupported()
    messages = [made for each in request.messages for made in _messages(each)]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    last = messages[-1] if messages else {}
    body = {
        **request.further, **_tools(request), **_format(request),
        "model": request.model, "max_tokens": request.max_tokens, "messages": messages,
        "stream": request.stream, "stop": request.stop_sequences, "n": 1,
        "continue_final_message": last.get("role") == "assistant" and not last.get("tool_calls"),
    }  # fmt: skip
    thinks = None if request.thinking is None else THINKS.get(request.thinking.type)
    servers = [each for each in request.tools or () if isinstance(each, ServerTool)]
    ignored = tuple(dict.fromkeys(each.name or each.type for each in servers))
    return ChatRequest.of(body, Further(cuts_length=True, thinks=thinks, ignored_tools=ignored))


def _format(request: MessagesRequest) -> dict[str, Any]:
    form = request.output_format or (request.output_config and request.output_config.format)
    schema = {"json_schema": {"schema": form.schema_, "strict": True}} if form else {}
    return {"response_format": {"type": "json_schema", **schema}} if form else {}


def _tools(request: MessagesRequest) -> dict[str, Any]:
    choice = request.tool_choice or ToolChoice(type="auto")
    named = {"type": "function", "function": {"name": choice.name}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in request.tools or () if isinstance(tool, Tool)
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


def error_body(problem: Problem) -> MessageError:
    default = "invalid_request_error" if problem.status < 500 else "overloaded_error"
    kind = "api_error" if problem.status == 500 else KINDS.get(problem.status, default)
    message = problem.for_messages if isinstance(problem, TooLong) else problem.message
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageReply(BlockReply):
    """Of POST /v1/messages."""

    request, types = MessagesRequest, (Message, MessageEvent)
    route = "answer_messages"
    lengths = LengthFields("messages")
    errors = (MessageError, Error)  # the second one before the route is reached

    @classmethod
    def read(cls, body: dict[str, Any]) -> ChatRequest:
        return chat_request(MessagesRequest.read(body))

    @staticmethod
    def failure(problem: Problem) -> MessageError:
        return error_body(problem)

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.state()}
        yield from super().begin()

    def step(self, step: BlockEvent) -> Iterator[MessageEvent]:
        index = step.block.index
        if step.kind == "open":
            block = self._block(step.block, begun=True)
            yield {"type": "content_block_start", "index": index, "content_block": block}
        elif step.kind == "delta":
            kind, name = _delta_names(step.block)
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: step.text}}
        else:
            if step.block.thinking:
                signed: dict[str, str | None] = {"type": "signature_delta", "signature": self.id}
                yield {"type": "content_block_delta", "index": index, "delta": signed}
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
            "content": [self._block(block) for block in blocks],
            "stop_reason": reason, "stop_sequence": stopped,
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

    def _block(self, block: ContentBlock, *, begun: bool = False) -> TextBlock | ThinkingBlock | ToolUseBlock:
        text = "" if begun else block.text
        if block.thinking:
            return {"type": "thinking", "thinking": text, "signature": "" if begun else self.id}
        if block.call is None:
            return {"type": "text", "text": text}
        given = {} if begun else parsed_object(block.text)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}


def _delta_names(block: ContentBlock) -> tuple[str, str]:
    """Return the type of an event that adds to a block, and the field that has what it adds."""
    if block.thinking:
        return "thinking_delta", "thinking"
    return ("text_delta", "text") if block.call is None else ("input_json_delta", "partial_json")
