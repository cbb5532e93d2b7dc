"""The types of replies and of the events of streams, as the OpenAPI document has them.

Replies are made as plain dictionaries; tests hold them against the document.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, cast

from typing_extensions import TypedDict


def record(name: str, description: str | None = None, /, **fields: Any) -> Any:
    """Return the type of dictionaries that have these fields, and no others."""
    made = cast(Any, TypedDict)(name, fields, closed=True)
    made.__doc__ = description
    return made


# For types that are made here, which mypy does not know as such.
LIST, DICT, MAYBE = cast(Any, list), cast(Any, dict), cast(Any, NotRequired)
Reason: TypeAlias = Literal["stop", "length", "content_filter", "tool_calls"]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
StopReason: TypeAlias = Literal["end_turn", "stop_sequence", "max_tokens", "refusal", "tool_use"]

# Tokens, with their scores and their sources.
Scores = {"token": str, "logprob": float | None, "bytes": LIST[int]}
TokenScore = record("TokenScore", **Scores)
ScoredToken = record("ScoredToken", **Scores, top_logprobs=LIST[TokenScore])
ChatLogprobs = record("ChatLogprobs", content=LIST[ScoredToken], refusal=None)
CompletionLogprobs = record(
    "CompletionLogprobs", tokens=LIST[str], token_logprobs=LIST[float | None],
    top_logprobs=LIST[DICT[str, float | None] | None], text_offset=LIST[int],
)  # fmt: skip
PromptScore = record(
    "PromptScore",
    "A token at a place of a prompt, in vLLM's shape; its rank is known among the likeliest tokens alone.",
    logprob=float | None, rank=int | None, decoded_token=str,
)  # fmt: skip
Origin = record(
    "Origin", "The source of a token.",
    token_id=int, origin=Literal["drafter", "target", "bonus"], text=str | None,
)  # fmt: skip
Round = record(
    "Round", "A round of a sample, as `RoundTrace`, with the texts of its tokens.",
    start=int, drafter=str | None, budget=int, draft=LIST[int], p=LIST[float], q=LIST[float], accepted=int,
    next_token=int, next_p=float, emitted=int, discarded=bool, rollback=float | None, legal=LIST[int] | None,
    after_sibling=int | None, draft_texts=LIST[str], next_text=str, after_text=str | None,
)  # fmt: skip

# Chats and completions.
PromptTokens = record("PromptTokens", cached_tokens=int)
CompletionTokens = record(
    "CompletionTokens",
    "Those of the reasoning, and of the request's prediction in samples that have ended.",
    reasoning_tokens=int, accepted_prediction_tokens=int, rejected_prediction_tokens=int,
)  # fmt: skip
Usage = record(
    "Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int,
    prompt_tokens_details=PromptTokens, completion_tokens_details=CompletionTokens,
)  # fmt: skip
Drafting = record(
    "Drafting", mean_acceptance_length=float | None, draft_acceptance_rate=float | None,
    acceptance_histogram=LIST[int], num_spec_steps=int, num_draft_tokens=int, num_accepted_tokens=int,
    drafters=DICT[str, int],
)  # fmt: skip
RequestMetrics = record(
    "RequestMetrics", "How drafting went, in vLLM's shape.",
    speculative_decoding=Drafting, tokens_per_second=float,
)  # fmt: skip
HEAD = {"id": str, "created": int, "model": str, "system_fingerprint": str}
WHOLE = {**HEAD, "usage": Usage, "metrics": RequestMetrics}
CHUNK = {**HEAD, "metrics": MAYBE[RequestMetrics], "usage": MAYBE[Usage | None]}
# What follows the reason is no part of the API; `stop_reason` is the stop string that ended the text, or the
# id of `stop_token_ids`. The last chunk of a sample has the reason and what follows it.
SOURCES = {
    "token_ids": MAYBE[LIST[int]], "provenance": MAYBE[LIST[Origin]],
    "trace": MAYBE[LIST[Round]],
}  # fmt: skip
CHOICE = {
    "index": int, "finish_reason": Reason, "stop_reason": str | int | None, "seed": int, "lossless": bool,
    "deterministic": bool, **SOURCES,
}  # fmt: skip
PART = {
    "index": int, "finish_reason": Reason | None, "stop_reason": MAYBE[str | int | None],
    "seed": MAYBE[int], "lossless": MAYBE[bool], "deterministic": MAYBE[bool], **SOURCES,
}  # fmt: skip
IDS = {"prompt_token_ids": MAYBE[LIST[int]]}
PROMPT = {**IDS, "prompt_logprobs": MAYBE[LIST[DICT[str, PromptScore] | None]]}

CalledFunction = record("CalledFunction", name=str, arguments=str)
ToolCall = record("ToolCall", id=str, type=Literal["function"], function=CalledFunction)
ChatMessage = record(
    "ChatMessage", "A reply; its reasoning has both names that clients look for.",
    role=Literal["assistant"], content=str | None, refusal=None, reasoning_content=MAYBE[str],
    reasoning=MAYBE[str], tool_calls=MAYBE[LIST[ToolCall]],
)  # fmt: skip
ChatChoice = record("ChatChoice", **CHOICE, message=ChatMessage, logprobs=ChatLogprobs | None)
Chat = record(
    "Chat", "The reply of POST /v1/chat/completions.",
    **WHOLE, object=Literal["chat.completion"], choices=LIST[ChatChoice], **PROMPT,
)  # fmt: skip
FunctionPart = record("FunctionPart", name=MAYBE[str], arguments=str)
ToolCallPart = record(
    "ToolCallPart", index=int, id=MAYBE[str], type=MAYBE[Literal["function"]],
    function=FunctionPart,
)  # fmt: skip
Delta = record(
    "Delta", role=MAYBE[Literal["assistant"]], content=MAYBE[str],
    reasoning_content=MAYBE[str], reasoning=MAYBE[str],
    tool_calls=MAYBE[LIST[ToolCallPart]],
)  # fmt: skip
ChatPart = record("ChatPart", **PART, delta=Delta, logprobs=ChatLogprobs | None)
ChatChunk = record(
    "ChatChunk", "A chunk of a streamed chat. The one with the usage has no choices.",
    **CHUNK, object=Literal["chat.completion.chunk"], choices=LIST[ChatPart], **IDS,
)  # fmt: skip
CompletionChoice = record(
    "CompletionChoice", **CHOICE, text=str, logprobs=CompletionLogprobs | None, **PROMPT
)
Completion = record(
    "Completion", "The reply of POST /v1/completions.",
    **WHOLE, object=Literal["text_completion"], choices=LIST[CompletionChoice],
)  # fmt: skip
CompletionPart = record("CompletionPart", **PART, text=str, logprobs=CompletionLogprobs | None, **IDS)
CompletionChunk = record(
    "CompletionChunk", "A chunk of a streamed completion. The one with the usage has no choices.",
    **CHUNK, object=Literal["text_completion"], choices=LIST[CompletionPart],
)  # fmt: skip

# Responses.
OutputText = record(
    "OutputText", type=Literal["output_text"], text=str, annotations=LIST[Any], logprobs=LIST[ScoredToken]
)
ReasoningText = record("ReasoningText", type=Literal["reasoning_text"], text=str)
OutputItem = record(
    "OutputItem", id=str, type=Literal["message"], role=Literal["assistant"], status=Status,
    content=LIST[OutputText],
)  # fmt: skip
FunctionItem = record(
    "FunctionItem", id=str, type=Literal["function_call"], status=Status, call_id=str, name=str,
    arguments=str,
)  # fmt: skip
ReasoningItem = record(
    "ReasoningItem", "The reasoning; no summary of it is made.",
    id=str, type=Literal["reasoning"], status=Status, summary=LIST[Any], content=LIST[ReasoningText],
)  # fmt: skip
OutputTokens = record("OutputTokens", reasoning_tokens=int)
ResponseUsage = record(
    "ResponseUsage", input_tokens=int, input_tokens_details=PromptTokens, output_tokens=int,
    output_tokens_details=OutputTokens, total_tokens=int,
)  # fmt: skip
Incomplete = record("Incomplete", reason=Literal["max_output_tokens", "content_filter"])
Response = record(
    "Response", "The reply of POST /v1/responses.",
    id=str, object=Literal["response"], created_at=int, model=str, status=Status,
    output=LIST[OutputItem | FunctionItem | ReasoningItem], usage=ResponseUsage | None,
    incomplete_details=Incomplete | None, error=None, instructions=str | None, max_output_tokens=int | None,
    metadata=DICT[str, Any], parallel_tool_calls=bool, temperature=float | None,
    tool_choice=str | DICT[str, Any], tools=LIST[DICT[str, Any]], top_p=float | None,
    truncation=Literal["auto", "disabled"],
)  # fmt: skip
ResponseEvent = record(
    "ResponseEvent", "An event of a streamed response; which of the fields it has depends on its type.",
    type=str, sequence_number=int, response=MAYBE[Response],
    item=MAYBE[OutputItem | FunctionItem | ReasoningItem], part=MAYBE[OutputText | ReasoningText],
    item_id=MAYBE[str], output_index=MAYBE[int], content_index=MAYBE[int],
    delta=MAYBE[str], text=MAYBE[str], name=MAYBE[str], arguments=MAYBE[str],
    logprobs=MAYBE[LIST[ScoredToken]], message=MAYBE[str], code=MAYBE[str | None],
    param=MAYBE[str | None],
)  # fmt: skip
InputTokens = record(
    "InputTokens", "The reply of POST /v1/responses/input_tokens.",
    object=Literal["response.input_tokens"], input_tokens=int,
)  # fmt: skip

# Messages.
TextBlock = record("TextBlock", type=Literal["text"], text=str)
ThinkingBlock = record(
    "ThinkingBlock",
    "The reasoning; clients send it back with its signature, which says which reply it is of.",
    type=Literal["thinking"], thinking=str, signature=str,
)  # fmt: skip
ToolUseBlock = record("ToolUseBlock", type=Literal["tool_use"], id=str, name=str, input=DICT[str, Any])
MessageUsage = record(
    "MessageUsage", input_tokens=int, output_tokens=int, cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
)  # fmt: skip
Message = record(
    "Message", "The reply of POST /v1/messages.",
    id=str, type=Literal["message"], role=Literal["assistant"], model=str,
    content=LIST[TextBlock | ThinkingBlock | ToolUseBlock], stop_reason=StopReason | None,
    stop_sequence=str | None, usage=MessageUsage,
)  # fmt: skip
MessageErrorFields = record("MessageErrorFields", type=str, message=str)
MessageError = record(
    "MessageError", "An error in the shape of Anthropic's API.",
    type=Literal["error"], error=MessageErrorFields,
)  # fmt: skip
MessageEvent = record(
    "MessageEvent", "An event of a streamed message; which of the fields it has depends on its type.",
    type=str, message=MAYBE[Message], index=MAYBE[int],
    content_block=MAYBE[TextBlock | ThinkingBlock | ToolUseBlock],
    delta=MAYBE[DICT[str, str | None]], usage=MAYBE[MessageUsage],
    error=MAYBE[MessageErrorFields],
)  # fmt: skip
MessageTokens = record("MessageTokens", "The reply of POST /v1/messages/count_tokens.", input_tokens=int)

# Other routes.
ErrorFields = record("ErrorFields", message=str, type=str, param=str | None, code=str | None)
Error = record(
    "Error", "An error in the shape of the OpenAI API; within a stream, an event has the same shape.",
    error=ErrorFields,
)  # fmt: skip
Tokens = record("Tokens", "The reply of POST /tokenize.", tokens=LIST[int], count=int, max_model_len=int)
Text = record("Text", "The reply of POST /detokenize.", prompt=str)
TokenizerInfo = record(
    "TokenizerInfo",
    """The reply of GET /tokenizer_info: what a client needs beside /tokenize and /detokenize.

lm-eval's remote tokenizer reads it
(https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/utils.py).""",
    tokenizer_class=str, bos_token=str | None, eos_token=str | None, pad_token=str | None,
    chat_template=str | None, model_max_length=int,
)  # fmt: skip
Health = record("Health", status=Literal["ok"])
Version = record("Version", version=str)
ModelCard = record("ModelCard", id=str, object=Literal["model"], created=int, owned_by=str, max_model_len=int)
ModelList = record("ModelList", object=Literal["list"], data=LIST[ModelCard])
DrafterTraits = record("DrafterTraits", lossless=bool)
Capabilities = record(
    "Capabilities", "What the model and the server can do.",
    model=str, max_model_len=int, max_batch=int, deterministic=bool, weights=str | None, lora=LIST[str],
    drafters=DICT[str, DrafterTraits], default_drafter=str | None, policy=str, policies=LIST[str], chat=bool,
    tools=bool, prediction=bool, constraints=LIST[str], streams=LIST[str],
)  # fmt: skip
