"""POST /tokenize and /detokenize: text -> token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import TypedDict

from foredraft.decode.params import is_whole
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.problems import Problem
from foredraft.serve.requests import Body, Items, check_model
from foredraft.serve.state import Model
from foredraft.serve.streaming import as_json

__all__ = ["DetokenizeRequest", "Text", "TokenizeRequest", "Tokens"]


class Tokens(TypedDict, closed=True):
    """The reply of POST /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(TypedDict, closed=True):
    """The reply of POST /detokenize."""

    prompt: str


PIECE = 16 << 10  # ids that are read or written at a time: a list is written while all other threads wait


class _TokensRequest(Body):
    """The fields of both kinds of request."""

    harmless: ClassVar[frozenset[str]] = frozenset(("user", "request_id"))
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (None,), "return_token_strs": (None, False), "skip_special_tokens": (None, False),
    }  # fmt: skip
    model: str | None = None

    def tokenizer_of(self, model: Model) -> Tokenizer:
        """Return the tokenizer that the request asks for.

        Raises:
            Problem: It asks for another model or for what is not supported, or the model has no tokenizer.
        """
        if self.model is not None:
            check_model(self.model, model.names)
        self.refuse_unsupported()
        if model.llm.tokenizer is None:
            raise Problem(400, "this model has no tokenizer; use token ids everywhere", param="model")
        return model.llm.tokenizer


class TokenizeRequest(_TokensRequest):
    """The body of POST /tokenize."""

    prompt: str
    add_special_tokens: bool | None = None

    def answer(self, model: Model) -> bytes:
        """Return the reply in JSON; it may take long for a long text.

        Raises:
            Problem: The request is refused.
            RequestError: The text is not valid Unicode.
        """
        ids = self.tokenizer_of(model).encode(self.prompt, self.add_special_tokens is not False)
        pieces = [as_json(ids[start : start + PIECE])[1:-1] for start in range(0, len(ids), PIECE)]
        rest = as_json({"count": len(ids), "max_model_len": model.llm.max_length})
        return f'{{"tokens":[{",".join(pieces)}],{rest[1:]}'.encode()


class DetokenizeRequest(_TokensRequest):
    """The body of POST /detokenize."""

    tokens: Items[int]

    def answer(self, model: Model) -> bytes:
        """Return the reply in JSON; it may take long for many tokens.

        Raises:
            Problem: The request is refused.
        """
        tokenizer, size = self.tokenizer_of(model), model.llm.loaded.spec.vocab_size
        if not all(is_whole(id, 0, size - 1) for id in self.tokens):
            raise Problem(400, f"tokens must be ids of this model, from 0 to {size - 1}", param="tokens")
        stream = tokenizer.detokenizer(skip_special=False)
        # the texts of a million tokens at once would leave memory behind
        starts = range(0, len(self.tokens), PIECE)
        text = "".join([stream.push(self.tokens[start : start + PIECE]) for start in starts])
        return as_json({"prompt": text + stream.pending()}).encode()
