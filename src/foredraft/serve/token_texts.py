"""Token texts: single tokens as text and bytes, and their log-probabilities in completions and chats."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable

from typing_extensions import TypedDict

from foredraft.decode.scores import Score
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer

__all__ = ["ChatLogprobs", "CompletionLogprobs", "Offsets", "TokenTexts"]

LEAST = -9999.0  # in place of minus infinity, which is no JSON


class TokenScore(TypedDict, closed=True):
    token: str
    logprob: float | None
    bytes: list[int]


class ScoredToken(TypedDict, closed=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TokenScore]


class ChatLogprobs(TypedDict, closed=True):
    content: list[ScoredToken]
    refusal: None


class CompletionLogprobs(TypedDict, closed=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class TokenTexts:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._bytes = [] if tokenizer is None else ByteCodec(tokenizer).table(vocabulary)

    def joined(self, ids: list[int]) -> str:
        """Return the text of several tokens; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(ids)

    def of(self, id: int) -> tuple[str, list[int]]:
        """Return a token's text, and its bytes."""
        if self._tokenizer is None:
            return f"token_id:{id}", []
        data = self._bytes[id] or self._tokenizer.text([id], False).encode()
        return data.decode("utf-8", "replace"), list(data)

    def shown(self, id: int) -> str:
        """Return a token's text; where it ends or begins within a character, its bytes, such as <0xE2>."""
        text, data = self.of(id)
        return "".join(f"<0x{byte:02X}>" for byte in data) if "\N{REPLACEMENT CHARACTER}" in text else text

    def chat_logprobs(self, scores: Iterable[Score]) -> ChatLogprobs:
        """Return scores as chat completions have them."""

        def entry(id: int, logprob: float) -> TokenScore:
            text, data = self.of(id)
            return {"token": text, "logprob": _number(logprob), "bytes": data}

        content: list[ScoredToken] = [
            {**entry(score.token_id, score.logprob), "top_logprobs": [entry(*each) for each in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}


class Offsets:
    """The places of the tokens in one text, whose tokens come one after the other.

    A character lies where its first token does, and an incomplete one nowhere.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(self, scores: Iterable[Score]) -> CompletionLogprobs:
        """Return the scores of the next tokens as completions have them."""
        found: CompletionLogprobs = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for score in scores:
            text, data = self._texts.of(score.token_id)
            top = {self._texts.of(id)[0]: _number(logprob) for id, logprob in score.top}
            found["tokens"].append(text)
            found["token_logprobs"].append(_number(score.logprob))
            found["top_logprobs"].append(top or None)
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(bytes(data)) if data else text)
        return found


def _number(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it: null for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else max(logprob, LEAST)
