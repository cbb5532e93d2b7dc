"""POST /v1/responses: OpenAI's newer shape, without state, over the same chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from foredraft.errors import shortened
from foredraft.llm.output import Output
from foredraft.serve.blocks import BlockEvent, ContentBlock
from foredraft.serve.completions import PromptTokens
from foredraft.serve.conversation import messages_of_items
from foredraft.serve.problems import LengthFields, Problem
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.requests import MAX_LOGPROBS, Body, ChatRequest, Further, Items
from foredraft.serve.scored_text import ShownToken
from foredraft.serve.token_texts import ScoredToken
from foredraft.serve.tool_calls import is_object
from foredraft.serve.tools import Function

HARMLESS = frozenset(
    "store user service_tier max_tool_calls"
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
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False), "prompt": (None,),
    "messages": (None,), "max_tokens": (None,), "response_format": (None,), "n": (None, 1),
    "logprobs": (None, False), "provenance": (None, False), "return_token_ids": (None, False),
    "prompt_logprobs": (None,),
}  # fmt: skip


class Tool(Function):
    """A function that the client runs."""

    type: Literal["function"]


class OtherTool(BaseModel):
    """A tool that is no function: one of OpenAI's servers, a namespace of functions, or one of free text."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    name: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.type} {self.name}" if self.name else self.type


def _kind_of_tool(tool: Any) -> Literal["function", "other"]:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind in (None, "function") else "other"


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)
]


class AllowedTools(BaseModel):
    """A choice of some of the tools; the model sees the other functions, too."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[OtherTool]


def _kind_of_choice(choice: Any) -> Literal["word", "allowed", "named"]:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[OtherTool, Tag("named")],
    Discriminator(_kind_of_choice),
]


class ResponsesRequest(Body):
    """The body of POST /v1/responses; fields of chat completions and of the library's own may be added."""

    harmless, unsupported = HARMLESS, UNSUPPORTED
    model: str | None = None
    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
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


class ReasoningText(TypedDict, closed=True):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict, closed=True):
    """The reasoning; no summary of it is made."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


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
    output: list[OutputItem | FunctionItem | ReasoningItem]
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
    item: NotRequired[OutputItem | FunctionItem | ReasoningItem]
    part: NotRequired[OutputText | ReasoningText]
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


def chat_request(request: ResponsesRequest) -> ChatRequest:
    request.refuse_unsupported()
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    messages = messages_of_items(given)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    form = (request.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    tools = [
        {"type": "function", "function": tool.model_dump(exclude={"type"})}
        for tool in request.tools or ()
        if isinstance(tool, Tool)
    ]
    others = [tool for tool in request.tools or () if isinstance(tool, OtherTool)]
    scored = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    body = {
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        **request.further,
        "model": request.model, "messages": messages, "max_tokens": request.max_output_tokens,
        "stream": request.stream, "response_format": form, "tools": tools,
        "tool_choice": _choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls, "n": 1,
        "logprobs": scored, "top_logprobs": request.top_logprobs if scored else None,
        "truncate_prompt": "left" if request.truncation == "auto" else None,
    }  # fmt: skip
    return ChatRequest.of(body, Further(ignored_tools=tuple(dict.fromkeys(each.shown for each in others))))


def _choice(choice: str | OtherTool | AllowedTools | None) -> Any:
    if isinstance(choice, AllowedTools):
        named = [_named(each) for each in choice.tools if each.type == "function"]
        if not named:  # of those that are left out
            return "none" if choice.mode == "auto" else _named(choice.tools[0] if choice.tools else choice)
        return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": named}}
    return _named(choice) if isinstance(choice, OtherTool) else choice


def _named(choice: OtherTool | AllowedTools) -> dict[str, Any]:
    """Return the choice of one function; errors as `_choice`."""
    if choice.type != "function":
        says = f"tool_choice names {shortened(choice.type)}, and this server calls functions only"
        raise Problem(400, says, param="tool_choice", code="unsupported_parameter")
    return {"type": "function", "function": {"name": getattr(choice, "name", None)}}


class ResponseReply(BlockReply):
    """Of POST /v1/responses; its events are numbered."""

    request, types = ResponsesRequest, (Response, ResponseEvent)
    route = "answer_responses"
    lengths = LengthFields("input", ("max_output_tokens",), 'truncation "auto"')

    @classmethod
    def read(cls, body: dict[str, Any]) -> ChatRequest:
        return chat_request(ResponsesRequest.read(body))

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

    def _scores(self, block: ContentBlock) -> list[ScoredToken]:
        return self.texts.chat_logprobs(token for token in self.sample.told if token.block == block.index)

    def _unsent(self, block: ContentBlock) -> list[ScoredToken]:
        """Return the scores of a block's tokens that no delta has had."""
        for token in self.sample.told[self._seen :]:
            self._waiting.setdefault(token.block, []).append(token)
        self._seen = len(self.sample.told)
        return self.texts.chat_logprobs(self._waiting.pop(block.index, []))

    def _part(self, block: ContentBlock) -> OutputText:
        return _part(block.text, self._scores(block))

    def step(self, step: BlockEvent) -> Iterator[Event]:
        block, output = step.block, {"output_index": step.block.index}
        place = {"item_id": self._item_id(block), **output}
        if block.call is None:
            place["content_index"] = 0
        name = f"response.{_text_name(block)}"
        if step.kind == "open":
            item = self._item(block, "in_progress")
            yield {"type": "response.output_item.added", **output, "item": item}
            if block.call is None:
                part = _reasoning("") if block.thinking else _part("", [])
                yield {"type": "response.content_part.added", **place, "part": part}
        elif step.kind == "delta":
            scores = {"logprobs": self._unsent(block)} if block.is_content else {}
            yield {"type": f"{name}.delta", **place, "delta": step.text, **scores}
        else:
            status = self._block_status(block)
            if block.call is None:
                done = _reasoning(block.text) if block.thinking else self._part(block)
                scores = {"logprobs": done["logprobs"]} if "logprobs" in done else {}
                yield {"type": f"{name}.done", **place, "text": block.text, **scores}
                yield {"type": "response.content_part.done", **place, "part": done}
            elif status == "completed":
                yield {"type": f"{name}.done", **place, "name": block.call.name, "arguments": block.text}
            yield {"type": "response.output_item.done", **output, "item": self._item(block, status)}

    def end(self) -> Iterator[Event]:
        ended = self.state()
        yield {"type": f"response.{ended['status']}", "response": ended}

    def state(self) -> Response:
        repeated = {name: self.body.get(name) for name in REPEATED}
        for name, otherwise in REPEATED_OR.items():
            repeated[name] = otherwise if self.body.get(name) is None else self.body[name]
        # those that the model sees
        repeated["tools"] = [each for each in self.body.get("tools") or () if each.get("type") == "function"]
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
            "output_tokens": new, "output_tokens_details": {"reasoning_tokens": self.sample.reasoning_tokens},
            "total_tokens": self.prompt_tokens + new,
        }  # fmt: skip

    def _status(self) -> Status:
        output = self.sample.output
        if output is None:
            return "in_progress"
        return "incomplete" if output.finish_reason in CUT else "completed"

    def _block_status(self, block: ContentBlock) -> Status:
        """Return how a block ended; the last one may be cut, as the output is."""
        last, call = block is self.sample.blocks.all[-1], block.call is not None
        cut = last and self._status() == "incomplete" and not (call and is_object(block.text))
        return "incomplete" if cut else "completed"

    def _item(self, block: ContentBlock, status: Status) -> OutputItem | FunctionItem | ReasoningItem:
        """Return a block as an item of the output; without content while it is in progress."""
        begun, id = status == "in_progress", self._item_id(block)
        if block.thinking:
            thought = [] if begun else [_reasoning(block.text)]
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": thought}
        if block.call is None:
            content = [] if begun else [self._part(block)]
            return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {
            "id": id, "type": "function_call", "status": status, "call_id": block.call.id,
            "name": block.call.name, "arguments": "" if begun else block.text,
        }  # fmt: skip

    def _item_id(self, block: ContentBlock) -> str:
        if block.thinking:
            return f"rs_{self.id}_{block.index}"
        return f"msg_{self.id}_{block.index}" if block.call is None else f"fc_{block.call.id}"


def _text_name(block: ContentBlock) -> str:
    if block.thinking:
        return "reasoning_text"
    return "output_text" if block.call is None else "function_call_arguments"


def _part(text: str, scores: list[ScoredToken]) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _reasoning(text: str) -> ReasoningText:
    return {"type": "reasoning_text", "text": text}
