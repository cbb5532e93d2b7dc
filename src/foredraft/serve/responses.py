"""POST /v1/responses: OpenAI's newer shape, without state, over the same chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NotRequired, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from foredraft.errors import shortened
from foredraft.llm.output import Output
from foredraft.serve.blocks import Block, Step
from foredraft.serve.completions import PromptTokens
from foredraft.serve.problems import Problem
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.requests import MAX_LOGPROBS, Body, ChatRequest, Items
from foredraft.serve.scored_text import ShownToken
from foredraft.serve.token_texts import ScoredToken
from foredraft.serve.tool_calls import is_object
from foredraft.serve.tools import Function

__all__ = ["Response", "ResponseEvent", "ResponseReply", "ResponsesRequest"]

HARMLESS = frozenset(
    "store user service_tier reasoning max_tool_calls"
    " prompt_cache_key prompt_cache_retention safety_identifier stream_options".split()
)
LOGPROBS = "message.output_text.logprobs"  # of `include`; most other values name what no reply has here
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
    "logprobs": (None, False), "provenance": (None, False), "return_token_ids": (None, False),
    "prompt_logprobs": (None,),
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
    model: str | None = None
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None


class OutputText(TypedDict, closed=True):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class OutputItem(TypedDict, closed=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class FunctionItem(TypedDict, closed=True):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputTokens(TypedDict, closed=True):
    reasoning_tokens: int


class ResponseUsage(TypedDict, closed=True):
    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class Incomplete(TypedDict, closed=True):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(TypedDict, closed=True):
    """The reply of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Status
    output: list[OutputItem | FunctionItem]
    usage: ResponseUsage | None
    incomplete_details: Incomplete | None
    error: None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    temperature: float | None
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["auto", "disabled"]


class ResponseEvent(TypedDict, closed=True):
    """An event of a streamed response; which of the fields it has depends on its type."""

    type: str
    sequence_number: int
    response: NotRequired[Response]
    item: NotRequired[OutputItem | FunctionItem]
    part: NotRequired[OutputText]
    item_id: NotRequired[str]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[ScoredToken]]
    message: NotRequired[str]
    code: NotRequired[str | None]
    param: NotRequired[str | None]


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the same request to POST /v1/chat/completions.

    Raises:
        Problem: The body is wrong, or asks for what is not supported.
    """
    request = ResponsesRequest.read(body)
    request.refuse_unsupported()
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
    scored = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    choice: Any = request.tool_choice
    if isinstance(choice, NamedChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return {
        **request.further,
        "model": request.model, "messages": messages, "max_tokens": request.max_output_tokens,
        "stream": request.stream, "response_format": form, "tools": tools, "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls, "n": 1,
        "logprobs": scored, "top_logprobs": request.top_logprobs if scored else None,
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


class ResponseReply(BlockReply):
    """Of POST /v1/responses; its events are numbered."""

    request, types = ResponsesRequest, (Response, ResponseEvent)
    route = "answer_responses"

    @classmethod
    def read(cls, body: dict[str, Any]) -> ChatRequest:
        return ChatRequest.read(chat_body(body))

    @staticmethod
    def failure(problem: Problem) -> Event:
        return {"type": "error", "message": problem.message, "code": problem.code, "param": problem.param}

    @staticmethod
    def numbered(event: Event, number: int) -> Event:
        return {**event, "sequence_number": number}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen = 0  # tokens of the sample that the deltas of a stream have seen
        self._waiting: dict[int, list[ShownToken]] = {}  # those that wait for a delta of their block

    def begin(self) -> Iterator[Event]:
        for name in ("response.created", "response.in_progress"):
            yield {"type": name, "response": self.state()}
        yield from super().begin()

    def _scores(self, block: Block) -> list[ScoredToken]:
        """Return the scores of a block's tokens."""
        return self.texts.chat_logprobs(token for token in self.sample.told if token.block == block.index)

    def _unsent(self, block: Block) -> list[ScoredToken]:
        """Return the scores of a block's tokens that no delta has had."""
        for token in self.sample.told[self._seen :]:
            self._waiting.setdefault(token.block, []).append(token)
        self._seen = len(self.sample.told)
        return self.texts.chat_logprobs(self._waiting.pop(block.index, []))

    def _part(self, block: Block) -> OutputText:
        """Return a block of text as the content of an item."""
        return _part(block.text, self._scores(block))

    def step(self, step: Step) -> Iterator[Event]:
        block, output = step.block, {"output_index": step.block.index}
        place = {"item_id": self._item_id(block), **output}
        if block.call is None:
            place["content_index"] = 0
        if step.kind == "open":
            item = self._item(block, "in_progress")
            yield {"type": "response.output_item.added", **output, "item": item}
            if block.call is None:
                yield {"type": "response.content_part.added", **place, "part": _part("", [])}
        elif step.kind == "delta" and block.call is None:
            scores = self._unsent(block)
            yield {"type": "response.output_text.delta", **place, "delta": step.text, "logprobs": scores}
        elif step.kind == "delta":
            yield {"type": "response.function_call_arguments.delta", **place, "delta": step.text}
        else:
            status = self._block_status(block)
            if block.call is None:
                part = self._part(block)
                done = {"text": block.text, "logprobs": part["logprobs"]}
                yield {"type": "response.output_text.done", **place, **done}
                yield {"type": "response.content_part.done", **place, "part": part}
            elif status == "completed":
                called = {"name": block.call.name, "arguments": block.text}
                yield {"type": "response.function_call_arguments.done", **place, **called}
            yield {"type": "response.output_item.done", **output, "item": self._item(block, status)}

    def end(self) -> Iterator[Event]:
        ended = self.state()
        yield {"type": f"response.{ended['status']}", "response": ended}

    def state(self) -> Response:
        """Return the response as it is now."""
        repeated = {name: self.body.get(name) for name in REPEATED}
        for name, otherwise in REPEATED_OR.items():
            repeated[name] = otherwise if self.body.get(name) is None else self.body[name]
        output, status = self.sample.output, self._status()
        blocks = [] if output is None else self.sample.blocks.all
        reason = None if output is None else CUT.get(output.finish_reason)
        return cast(Response, {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created, "model": self.model,
            "error": None, "incomplete_details": None if reason is None else {"reason": reason},
            **repeated,
            "status": status,
            "output": [self._item(each, self._block_status(each)) for each in blocks],
            "usage": None if output is None else self._usage(output),
        })  # fmt: skip

    def _usage(self, output: Output) -> ResponseUsage:
        new = self.sample.tokens
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": new, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + new,
        }  # fmt: skip

    def _status(self) -> Status:
        output = self.sample.output
        if output is None:
            return "in_progress"
        return "incomplete" if output.finish_reason in CUT else "completed"

    def _block_status(self, block: Block) -> Status:
        """Return how a block ended; the last one may be cut, as the output is."""
        last, call = block is self.sample.blocks.all[-1], block.call is not None
        cut = last and self._status() == "incomplete" and not (call and is_object(block.text))
        return "incomplete" if cut else "completed"

    def _item(self, block: Block, status: Status) -> OutputItem | FunctionItem:
        """Return a block as an item of the output; without content while it is in progress."""
        begun, id = status == "in_progress", self._item_id(block)
        if block.call is None:
            content = [] if begun else [self._part(block)]
            return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {
            "id": id, "type": "function_call", "status": status, "call_id": block.call.id,
            "name": block.call.name, "arguments": "" if begun else block.text,
        }  # fmt: skip

    def _item_id(self, block: Block) -> str:
        return f"msg_{self.id}_{block.index}" if block.call is None else f"fc_{block.call.id}"


def _part(text: str, scores: list[ScoredToken]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
