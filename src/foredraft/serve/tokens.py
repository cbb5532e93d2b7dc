"""POST /tokenize and /detokenize, the tokenizer itself, and prompts counted without generating.

https://platform.claude.com/docs/en/api/messages-count-tokens,
https://platform.openai.com/docs/api-reference/responses/input-tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import TypedDict

from foredraft.decode.params import is_whole
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve import messages, responses
from foredraft.serve.messages import CountTokensRequest, MessageError
from foredraft.serve.problems import Error, Problem
from foredraft.serve.requests import Body, ChatRequest, Items, Job, check_model
from foredraft.serve.responses import ResponsesRequest
from foredraft.serve.state import Model
from foredraft.serve.streaming import as_json


class MessageTokens(TypedDict, closed=True):
    """The reply of POST /v1/messages/count_tokens."""

    input_tokens: int


class InputTokens(TypedDict, closed=True):
    """The reply of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Counter:
    """A route that counts."""

    name: str  # of the route
    request: type[Body]  # the type of its body
    type: Any  # the type of its reply
    errors: tuple[Any, ...]  # the types of a refusal's body
    read: Callable[[dict[str, Any]], ChatRequest]  # returns the chat of a body
    reply: Callable[[int], MessageTokens | InputTokens]  # returns the reply for a number of tokens


COUNTERS = {
    "/v1/messages/count_tokens": Counter(
        "count_tokens", CountTokensRequest, MessageTokens, (MessageError, Error),
        lambda body: messages.chat_request(CountTokensRequest.read(body)),
        lambda tokens: MessageTokens(input_tokens=tokens),
    ),
    "/v1/responses/input_tokens": Counter(
        "count_input_tokens", ResponsesRequest, InputTokens, (Error,),
        lambda body: responses.chat_request(ResponsesRequest.read(body)),
        lambda tokens: InputTokens(object="response.input_tokens", input_tokens=tokens),
    ),
}  # fmt: skip


class Tokens(TypedDict, closed=True):
    """The reply of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(TypedDict, closed=True):
    """The reply of POST /detokenize."""

    prompt: str


class TokenizerInfo(TypedDict, closed=True):
    """The reply of GET /tokenizer_info: what a client needs beside /tokenize and /detokenize.

    lm-eval's remote tokenizer reads it
    (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/utils.py).
    """

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int


# Fields of chats that say how a conversation becomes a prompt.
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
PIECE = 16 << 10  # ids that are read or written at a time: a list is written while all other threads wait


class _TokensRequest(Body):
    """The fields of both kinds of request."""

    harmless: ClassVar[frozenset[str]] = frozenset(("user", "request_id"))
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (None,), "return_token_strs": (None, False), "skip_special_tokens": (None, False),
        "with_pieces": (None, False), "parse_special": (None, True), "chat_template": (None,),
    }  # fmt: skip
    model: str | None = None

    def tokenizer_of(self, model: Model) -> Tokenizer:
        if self.model is not None:
            check_model(self.model, model.names)
        self.refuse_unsupported()
        return tokenizer_of(model)


class TokenizeRequest(_TokensRequest):
    """The body of POST /tokenize: a text, or a conversation with the fields that chats render it by.

    `content` is llama.cpp's name of the text, to which it adds special tokens only where `add_special` asks
    for them; vLLM adds them to `prompt` unless `add_special_tokens` is false.
    """

    prompt: str | None = None
    content: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def answer(self, model: Model) -> bytes:
        """Return the reply in JSON; it may take long for a long text."""
        tokenizer = self.tokenizer_of(model)
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if not given:
            raise Problem(400, "prompt is missing; give prompt, content or messages", param="prompt")
        if len(given) > 1:
            problem = f"{given[0]} cannot hold together with {given[1]}; give one of them"
            raise Problem(400, problem, param=given[1])
        ids = self._conversation(model) if self.messages is not None else self._text(tokenizer)
        pieces = [as_json(ids[start : start + PIECE])[1:-1] for start in range(0, len(ids), PIECE)]
        rest = as_json({"count": len(ids), "max_model_len": model.llm.max_length})
        return f'{{"tokens":[{",".join(pieces)}],{rest[1:]}'.encode()

    def _text(self, tokenizer: Tokenizer) -> list[int]:
        for name in CHAT_FIELDS:
            if getattr(self, name) is not None:
                raise Problem(400, f"{name} needs messages", param=name)
        if self.content is not None:
            return tokenizer.encode(self.content, bool(self.add_special or self.add_special_tokens))
        return tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)

    def _conversation(self, model: Model) -> list[int]:
        if self.add_special_tokens:
            problem = "the chat template writes the special tokens of messages; leave it out"
            raise Problem(400, f"add_special_tokens: {problem}", param="add_special_tokens")
        given = {name: getattr(self, name) for name in CHAT_FIELDS}
        chat = ChatRequest.read({"messages": self.messages, "max_tokens": 0, **given})
        return Job.of(chat, model.llm, model.names).prompts[0]


class DetokenizeRequest(_TokensRequest):
    """The body of POST /detokenize."""

    tokens: Items[int]

    def answer(self, model: Model) -> bytes:
        """Return the reply in JSON; it may take long for many tokens."""
        tokenizer, size = self.tokenizer_of(model), model.llm.loaded.spec.vocab_size
        if not all(is_whole(id, 0, size - 1) for id in self.tokens):
            raise Problem(400, f"tokens must be ids of this model, from 0 to {size - 1}", param="tokens")
        stream = tokenizer.detokenizer(skip_special=False)
        # the texts of a million tokens at once would leave memory behind
        starts = range(0, len(self.tokens), PIECE)
        text = "".join([stream.push(self.tokens[start : start + PIECE]) for start in starts])
        return as_json({"prompt": text + stream.pending()}).encode()


def tokenizer_of(model: Model) -> Tokenizer:
    if model.llm.tokenizer is None:
        raise Problem(400, "this model has no tokenizer; use token ids everywhere", param="model")
    return model.llm.tokenizer


def tokenizer_info(model: Model) -> TokenizerInfo:
    tokenizer, spec = tokenizer_of(model), model.llm.loaded.spec
    chat = tokenizer.chat
    named = {} if chat is None else chat.special_tokens

    def token(name: str, id: int | None) -> str | None:
        return named.get(name) or (None if id is None else tokenizer.inner.id_to_token(id))

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos_token", spec.bos_token_id),
        "eos_token": token("eos_token", next(iter(spec.eos_token_ids), None)),
        "pad_token": token("pad_token", None),
        "chat_template": None if chat is None else chat.templates.get("default"),
        "model_max_length": model.llm.max_length,
    }
