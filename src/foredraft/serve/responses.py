"""POST /v1/responses: OpenAI's newer shape, without state, over the same chat requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from foredraft.errors import shortened
from foredraft.serve import reply_types
from foredraft.serve.blocks import BlockEvent, ContentBlock
from foredraft.serve.calls import is_object
from foredraft.serve.conversation import messages_of_items
from foredraft.serve.fields import NOT_OF_RESPONSES, OF_RESPONSES, Body, Items
from foredraft.serve.problems import LengthFields, Problem, invalid
from foredraft.serve.replies import BlockReply, Event
from foredraft.serve.reply_types import Status
from foredraft.serve.requests import MAX_LOGPROBS, ChatRequest
from foredraft.serve.tools import Function

LOGPROBS = "message.output_text.logprobs"  # of `include`; most other values name what no reply has here
# Fields of the request that the response repeats, with what holds where the request has none.
REPEATED: dict[str, Any] = {
    "instructions": None, "temperature": None, "top_p": None, "max_output_tokens": None, "metadata": {},
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled",
}  # fmt: skip
# Why a text ends that is not whole -> reason of the API.
CUT = {"length": "max_output_tokens", "constraint": "content_filter"}


class Tool(Function):
    """A function that the client runs."""

    type: Literal["function"]


class OtherTool(BaseModel, extra="allow", strict=True):
    """A tool that is no function: one of OpenAI's servers, a namespace of functions, or one of free text."""

    type: str
    name: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.type} {self.name}" if self.name else self.type


def kind_of(given: Any) -> Any:
    """Return the type of a tool or a choice, as it came or as a model of it."""
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


AnyTool = Annotated[
    Annotated[Tool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda tool: "function" if kind_of(tool) in (None, "function") else "other"),
]


class AllowedTools(BaseModel, extra="forbid", strict=True):
    """A choice of some of the tools; the model sees the other functions, too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[OtherTool]


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[OtherTool, Tag("named")],
    Discriminator(
        lambda choice: "word" if isinstance(choice, str)
        else "allowed" if kind_of(choice) == "allowed_tools" else "named"
    ),
]  # fmt: skip


class ResponsesRequest(Body):
    """The body of POST /v1/responses; fields of chat completions and of the library's own may be added."""

    harmless, unsupported = OF_RESPONSES, NOT_OF_RESPONSES
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

    def chat(self) -> ChatRequest:
        self.refuse_unsupported()
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = messages_of_items(given)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        form = (self.text or {}).get("format")
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        tools = self.tools or []
        scored = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        body = {
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            **self.further,
            "model": self.model, "messages": messages, "max_tokens": self.max_output_tokens,
            "stream": self.stream, "response_format": form,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in tools if isinstance(tool, Tool)
            ],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls, "n": 1,
            "logprobs": scored, "top_logprobs": self.top_logprobs if scored else None,
            "truncate_prompt": "left" if self.truncation == "auto" else None,
        }  # fmt: skip
        others = dict.fromkeys(tool.shown for tool in tools if isinstance(tool, OtherTool))
        return ChatRequest.of(body, others)


def _choice(choice: str | OtherTool | AllowedTools | None) -> Any:
    if isinstance(choice, AllowedTools):
        named = [_choice(each) for each in choice.tools if each.type == "function"]
        if named:  # the others are left out
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": named}}
        if choice.mode == "auto":
            return "none"
        choice = choice.tools[0] if choice.tools else OtherTool(type=choice.type)
    if not isinstance(choice, OtherTool):
        return choice
    if choice.type != "function":
        says = f"tool_choice names {shortened(choice.type)}, and this server calls functions only"
        raise invalid("tool_choice", says, code="unsupported_parameter")
    return {"type": "function", "function": {"name": choice.name}}


class ResponseReply(BlockReply):
    """Of POST /v1/responses; its events are numbered."""

    request, types = ResponsesRequest, (reply_types.Response, reply_types.ResponseEvent)
    route = "answer_responses"
    lengths = LengthFields("input", ("max_output_tokens",), 'truncation "auto"')

    def __init__(self, id: str, model: str, body: Mapping[str, Any], *args: Any) -> None:
        super().__init__(id, model, body, *args)
        self._repeated = {
            name: otherwise if body.get(name) is None else body[name] for name, otherwise in REPEATED.items()
        }
        # those that the model sees
        self._repeated["tools"] = [tool for tool in body.get("tools") or () if kind_of(tool) == "function"]
        self._sent = Counter[int]()  # scored tokens of each block that the deltas of a stream have had

    @staticmethod
    def failure(problem: Problem) -> Event:
        return {"type": "error", "message": problem.message, "code": problem.code, "param": problem.param}

    @staticmethod
    def numbered(event: Event, number: int) -> Event:
        return {**event, "sequence_number": number}

    def begin(self) -> Iterator[Event]:
        for name in ("response.created", "response.in_progress"):
            yield {"type": name, "response": self.state()}
        yield from super().begin()

    def step(self, step: BlockEvent) -> Iterator[Event]:
        block, output = step.block, {"output_index": step.block.index}
        place = {"item_id": self._item_id(block), **output}
        kind = "function_call_arguments"
        if block.call is None:
            place["content_index"], kind = 0, "reasoning_text" if block.thinking else "output_text"
        if step.kind == "open":
            item = self._item(block, "in_progress")
            yield {"type": "response.output_item.added", **output, "item": item}
            if block.call is None:
                yield {"type": "response.content_part.added", **place, "part": self._part(block, begun=True)}
        elif step.kind == "delta":
            scores = {}
            if block.is_content:
                new, self._sent[block.index] = block.tokens[self._sent[block.index] :], len(block.tokens)
                scores = {"logprobs": self.texts.chat_logprobs(new)}
            yield {"type": f"response.{kind}.delta", **place, "delta": step.text, **scores}
        else:
            status = self._block_status(block)
            if block.call is None:
                done = self._part(block)
                scores = {"logprobs": done["logprobs"]} if block.is_content else {}
                yield {"type": f"response.{kind}.done", **place, "text": block.text, **scores}
                yield {"type": "response.content_part.done", **place, "part": done}
            elif status == "completed":
                call = {"name": block.call.name, "arguments": block.text}
                yield {"type": f"response.{kind}.done", **place, **call}
            yield {"type": "response.output_item.done", **output, "item": self._item(block, status)}

    def end(self) -> Iterator[Event]:
        ended = self.state()
        yield {"type": f"response.{ended['status']}", "response": ended}

    def state(self) -> dict[str, Any]:
        output, sample = self.sample.output, self.sample
        blocks = [] if output is None else sample.blocks.all
        reason = None if output is None else CUT.get(output.finish_reason)
        status = "in_progress" if output is None else "completed" if reason is None else "incomplete"
        usage = None if output is None else {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens},
            "output_tokens": sample.tokens,
            "output_tokens_details": {"reasoning_tokens": sample.reasoning_tokens},
            "total_tokens": self.prompt_tokens + sample.tokens,
        }  # fmt: skip
        return {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created, "model": self.model,
            "error": None, "incomplete_details": None if reason is None else {"reason": reason},
            **self._repeated, "status": status,
            "output": [self._item(each, self._block_status(each)) for each in blocks], "usage": usage,
        }  # fmt: skip

    def _block_status(self, block: ContentBlock) -> Status:
        """Return how a block ended; the last one may be cut, as the output is."""
        last, output = block is self.sample.blocks.all[-1], self.sample.output
        ended = last and output is not None and output.finish_reason in CUT
        cut = ended and not (block.call is not None and is_object(block.text))
        return "incomplete" if cut else "completed"

    def _item(self, block: ContentBlock, status: Status) -> Event:
        """Return a block as an item of the output; without content while it is in progress."""
        begun, id, call = status == "in_progress", self._item_id(block), block.call
        if call is not None:
            return {
                "id": id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name,
                "arguments": "" if begun else block.text,
            }  # fmt: skip
        content = [] if begun else [self._part(block)]
        if block.thinking:
            return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, block: ContentBlock, *, begun: bool = False) -> dict[str, Any]:
        """Return the text of a block with its scores; "" where it has just begun."""
        text = "" if begun else block.text
        if block.thinking:
            return {"type": "reasoning_text", "text": text}
        scores = self.texts.chat_logprobs([] if begun else block.tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _item_id(self, block: ContentBlock) -> str:
        if block.call is not None:
            return f"fc_{block.call.id}"
        return f"{'rs' if block.thinking else 'msg'}_{self.id}_{block.index}"
