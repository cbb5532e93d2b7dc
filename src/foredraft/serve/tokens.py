"""POST /tokenize and /detokenize, the tokenizer itself, and prompts counted without generating.

https://platform.claude.com/docs/en/api/messages-count-tokens,
https://platform.openai.com/docs/api-reference/responses/input-tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from foredraft.decode.params import is_whole
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve import reply_types
from foredraft.serve.fields import NOT_OF_TOKENS, OF_TOKENS, Body, Items
from foredraft.serve.generations import Model
from foredraft.serve.messages import CountTokensRequest, MessageReply
from foredraft.serve.problems import invalid
from foredraft.serve.requests import ChatRequest, Job, Notes, as_problems, check_model
from foredraft.serve.responses import ResponsesRequest
from foredraft.serve.streaming import as_json

# Fields of chats that say how a conversation becomes a prompt.
CHAT_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
PIECE = 16 << 10  # ids that are read or written at a time: a list is written while all other threads wait


class _TokensRequest(Body):
    """The fields of both kinds of request."""

    harmless, unsupported = OF_TOKENS, NOT_OF_TOKENS
    model: str | None = None

    def chat(self) -> Any:
        return self

    def tokenizer_of(self, model: Model) -> Tokenizer:
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
        tokenizer = self.tokenizer_of(model)
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if not given:
            raise invalid("prompt", "prompt is missing; give prompt, content or messages")
        if len(given) > 1:
            raise invalid(given[1], f"{given[0]} cannot hold together with {given[1]}; give one of them")
        ids = self._ids(model, tokenizer)
        pieces = [as_json(ids[start : start + PIECE])[1:-1] for start in range(0, len(ids), PIECE)]
        rest = as_json({"count": len(ids), "max_model_len": model.llm.max_length})
        return f'{{"tokens":[{",".join(pieces)}],{rest[1:]}'.encode()

    def _ids(self, model: Model, tokenizer: Tokenizer) -> list[int]:
        fields = {name: getattr(self, name) for name in CHAT_FIELDS}
        if self.messages is not None:
            if self.add_special_tokens:
                problem = "the chat template writes the special tokens of messages; leave it out"
                raise invalid("add_special_tokens", f"add_special_tokens: {problem}")
            chat = ChatRequest.read({"messages": self.messages, "max_tokens": 0, **fields})
            return Job.of(chat, model.llm, model.names).prompts[0]
        for name, value in fields.items():
            if value is not None:
                raise invalid(name, f"{name} needs messages")
        if self.content is not None:
            return tokenizer.encode(self.content, bool(self.add_special or self.add_special_tokens))
        return tokenizer.encode(self.prompt or "", self.add_special_tokens is not False)


class DetokenizeRequest(_TokensRequest):
    """The body of POST /detokenize."""

    tokens: Items[int]

    def answer(self, model: Model) -> bytes:
        tokenizer, size = self.tokenizer_of(model), model.llm.loaded.spec.vocab_size
        if not all(is_whole(id, 0, size - 1) for id in self.tokens):
            raise invalid("tokens", f"tokens must be ids of this model, from 0 to {size - 1}")
        stream = tokenizer.detokenizer(skip_special=False)
        # the texts of a million tokens at once would leave memory behind
        starts = range(0, len(self.tokens), PIECE)
        text = "".join([stream.push(self.tokens[start : start + PIECE]) for start in starts])
        return as_json({"prompt": text + stream.pending()}).encode()


class Reader(NamedTuple):
    name: str  # of the route
    request: type[Body]  # the type of its body
    type: Any  # the type of its reply
    errors: tuple[Any, ...] = (reply_types.Error,)  # the types of a refusal's body
    either: bool = False  # a key may come in the header of either API
    beside: Mapping[str, str] = {}  # what a reply has beside the number of tokens

    def answer(self, given: Body, model: Model) -> tuple[bytes, Notes]:
        if isinstance(given, TokenizeRequest | DetokenizeRequest):
            return given.answer(model), {"x-ignored-fields": sorted(given.further)}
        chat = cast(ChatRequest, given)
        with as_problems(chat):
            job = Job.of(chat, model.llm, model.names)
        return as_json({**self.beside, "input_tokens": job.prompt_tokens}).encode(), job.notes


READERS = {
    "/tokenize": Reader("tokenize", TokenizeRequest, reply_types.Tokens),
    "/detokenize": Reader("detokenize", DetokenizeRequest, reply_types.Text),
    "/v1/messages/count_tokens": Reader(
        "count_tokens", CountTokensRequest, reply_types.MessageTokens, MessageReply.errors, True
    ),
    "/v1/responses/input_tokens": Reader(
        "count_input_tokens", ResponsesRequest, reply_types.InputTokens, either=True,
        beside={"object": "response.input_tokens"},
    ),
}  # fmt: skip


def tokenizer_of(model: Model) -> Tokenizer:
    if model.llm.tokenizer is None:
        raise invalid("model", "this model has no tokenizer; use token ids everywhere")
    return model.llm.tokenizer


def tokenizer_info(model: Model) -> dict[str, Any]:
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
