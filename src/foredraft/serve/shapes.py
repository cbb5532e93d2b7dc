"""Shapes: the types of all replies, for the OpenAPI document. Tests hold the server's replies against them.

Each type is closed: a reply with a field that its type does not name has not kept to it.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = [
    "Capabilities", "Chat", "ChatChunk", "Completion", "CompletionChunk", "Error", "Health", "Message",
    "MessageError", "MessageEvent", "ModelCard", "ModelList", "Response", "ResponseEvent", "Text", "Tokens",
    "Version",
]  # fmt: skip

closed = with_config(ConfigDict(extra="forbid"))
Reason = Literal["stop", "length", "content_filter", "tool_calls"]


# --- errors ---------------------------------------------------------------------------------------------


@closed
class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@closed
class Error(TypedDict):
    """An error in the shape of the OpenAI API; within a stream, an event has the same shape."""

    error: ErrorFields


@closed
class MessageErrorFields(TypedDict):
    type: str
    message: str


@closed
class MessageError(TypedDict):
    """An error in the shape of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorFields


# --- parts of completions and chats ---------------------------------------------------------------------


@closed
class PromptTokens(TypedDict):
    cached_tokens: int


@closed
class PredictedTokens(TypedDict):
    """Of the request's prediction, in samples that have ended."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@closed
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: PredictedTokens


@closed
class Drafting(TypedDict):
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafters: dict[str, int]


@closed
class RequestMetrics(TypedDict):
    """How drafting went."""

    speculative_decoding: Drafting
    tokens_per_second: float


@closed
class Origin(TypedDict):
    token_id: int
    origin: Literal["drafter", "target", "bonus"]
    text: str | None


@closed
class Round(TypedDict):
    """A round of a sample, as `RoundTrace`, with the texts of its tokens."""

    start: int
    drafter: str | None
    budget: int
    draft: list[int]
    p: list[float]
    q: list[float]
    accepted: int
    next_token: int
    next_p: float
    emitted: int
    discarded: bool
    rollback: float | None
    legal: list[int] | None
    draft_texts: list[str]
    next_text: str


@closed
class TokenScore(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


@closed
class ScoredToken(TokenScore):
    top_logprobs: list[TokenScore]


@closed
class ChatLogprobs(TypedDict):
    content: list[ScoredToken]
    refusal: None


@closed
class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class Ending(TypedDict):
    """What a choice says beyond the API once its text has ended."""

    stop_reason: str | None
    seed: int
    lossless: bool
    deterministic: bool
    trace: NotRequired[list[Round]]


class Ended(TypedDict, total=False):
    """The same in a stream, whose last chunk for a choice has it."""

    stop_reason: str | None
    seed: int
    lossless: bool
    deterministic: bool
    trace: list[Round]


class Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChunkHead(Head):
    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestMetrics]


# --- chats ----------------------------------------------------------------------------------------------


@closed
class CalledFunction(TypedDict):
    name: str
    arguments: str


@closed
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@closed
class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


@closed
class ChatChoice(Ending):
    index: int
    message: ChatMessage
    finish_reason: Reason
    logprobs: ChatLogprobs | None
    provenance: NotRequired[list[Origin]]


@closed
class Chat(Head):
    """The reply of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics


@closed
class FunctionPart(TypedDict):
    name: NotRequired[str]
    arguments: str


@closed
class ToolCallPart(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPart


@closed
class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallPart]


@closed
class ChatPart(Ended):
    index: int
    delta: Delta
    finish_reason: Reason | None
    logprobs: ChatLogprobs | None
    provenance: NotRequired[list[Origin]]


@closed
class ChatChunk(ChunkHead):
    """A chunk of a streamed chat. The one with the usage has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]


# --- completions ----------------------------------------------------------------------------------------


@closed
class CompletionChoice(Ending):
    index: int
    text: str
    finish_reason: Reason
    logprobs: CompletionLogprobs | None
    provenance: NotRequired[list[Origin]]


@closed
class Completion(Head):
    """The reply of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics


@closed
class CompletionPart(Ended):
    index: int
    text: str
    finish_reason: Reason | None
    logprobs: CompletionLogprobs | None
    provenance: NotRequired[list[Origin]]


@closed
class CompletionChunk(ChunkHead):
    """A chunk of a streamed completion. The one with the usage has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionPart]


# --- OpenAI's responses ---------------------------------------------------------------------------------


@closed
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


@closed
class OutputItem(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


@closed
class FunctionItem(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


@closed
class OutputTokens(TypedDict):
    reasoning_tokens: int


@closed
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


@closed
class Incomplete(TypedDict):
    reason: Literal["max_output_tokens", "content_filter"]


@closed
class Response(TypedDict):
    """The reply of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
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


@closed
class ResponseEvent(TypedDict):
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
    logprobs: NotRequired[list[Any]]
    message: NotRequired[str]
    code: NotRequired[str | None]
    param: NotRequired[str | None]


# --- Anthropic's messages -------------------------------------------------------------------------------


@closed
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@closed
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@closed
class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


@closed
class Message(TypedDict):
    """The reply of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "stop_sequence", "max_tokens", "refusal", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


@closed
class MessageEvent(TypedDict):
    """An event of a streamed message; which of the fields it has depends on its type."""

    type: str
    message: NotRequired[Message]
    index: NotRequired[int]
    content_block: NotRequired[TextBlock | ToolUseBlock]
    delta: NotRequired[dict[str, str | None]]
    usage: NotRequired[dict[str, int]]
    error: NotRequired[MessageErrorFields]


# --- models, tokens, health -----------------------------------------------------------------------------


@closed
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@closed
class DrafterTraits(TypedDict):
    lossless: bool


@closed
class Capabilities(TypedDict):
    """What the model and the server can do."""

    model: str
    max_model_len: int
    max_batch: int
    deterministic: bool
    weights: str | None
    drafters: dict[str, DrafterTraits]
    default_drafter: str | None
    policy: str
    policies: list[str]
    chat: bool
    tools: bool
    prediction: bool
    constraints: list[str]
    streams: list[str]


@closed
class Tokens(TypedDict):
    """The reply of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


@closed
class Text(TypedDict):
    """The reply of POST /detokenize."""

    prompt: str


@closed
class Health(TypedDict):
    status: Literal["ok"]


@closed
class Version(TypedDict):
    version: str
