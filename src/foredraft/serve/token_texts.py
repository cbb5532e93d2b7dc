"""Token texts: single tokens as text and bytes, and their log-probabilities in completions and chats.

A part of a character is spelled as OpenAI does in completions (`bytes:\\xe2\\x98`), so that the keys of
different tokens differ; in chats it is the text that it completes, beside its bytes.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from foredraft.decode.scores import Score
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.scored_text import ShownToken

LEAST = -9999.0  # in place of minus infinity, which is no JSON
PRINTABLE = range(0x20, 0x7F)  # bytes that OpenAI's spelling of a part of a character shows as they are


class TokenTexts:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._codec = None if tokenizer is None else ByteCodec(tokenizer)
        self._bytes = [] if self._codec is None else self._codec.table(vocabulary)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def is_special(self, id: int) -> bool:
        """Return whether a token is a special one, which most texts leave out."""
        return self._tokenizer is not None and id in self._tokenizer.special

    def data(self, id: int) -> bytes:
        """Return a token's bytes; those of its name where it is a special one."""
        if self._tokenizer is None:
            return b""
        return self._bytes[id] or self._tokenizer.text([id], False).encode()

    def name(self, id: int) -> str:
        """Return a token's text; where it holds a part of a character, its bytes as OpenAI spells them."""
        return spelled(self.data(id)) if self.has_text else f"token_id:{id}"

    def shown(self, id: int) -> str:
        """Return a token's text; where it ends or begins within a character, its bytes, such as <0xE2>."""
        if not self.has_text:
            return self.name(id)
        data = self.data(id)
        text = data.decode("utf-8", "replace")
        return "".join(f"<0x{byte:02X}>" for byte in data) if "\N{REPLACEMENT CHARACTER}" in text else text

    def echoed(self, ids: list[int], sent: str | None) -> str:
        """Return the text of a prompt, special tokens included; "" without a tokenizer."""
        if sent is not None or self._tokenizer is None:
            return sent or ""
        return self._tokenizer.decode(ids, skip_special=False)

    def echoed_tokens(self, ids: list[int], sent: str | None) -> list[bytes]:
        """Return the bytes of a prompt's tokens; joined, they are its echoed text.

        What the tokenizer adds to a text is no part of it: the tokens that it puts in front, and the space
        before the first word.
        """
        data = [self.data(id) for id in ids]
        added = [] if self._codec is None or sent is None else self._codec.prefix
        if added == ids[: len(added)]:
            data[: len(added)] = [b""] * len(added)
        joined, text = b"".join(data), self.echoed(ids, sent).encode()
        if joined.startswith(b" ") and (joined == b" " + text or not joined.startswith(text)):
            first = next(place for place, each in enumerate(data) if each)
            data[first] = data[first][1:]
        return data

    def chat_logprobs(self, tokens: Iterable[ShownToken]) -> list[dict[str, Any]]:
        return [self._scored(token) for token in tokens]

    def _scored(self, token: ShownToken) -> dict[str, Any]:
        score = token.score

        def entry(id: int, logprob: float) -> dict[str, Any]:
            own = id == score.token_id
            text, data = (token.text, token.data) if own else (self.name(id), self.data(id))
            return {"token": text, "logprob": _number(logprob), "bytes": list(data)}

        top = [entry(*each) for each in score.top]
        return {**entry(score.token_id, score.logprob), "top_logprobs": top}

    def prompt_scores(self, scores: Iterable[Score | None], top: int) -> list[dict[str, Any] | None]:
        """Return the scores of a prompt's tokens in vLLM's shape, by token id."""

        def ranked(score: Score) -> dict[str, Any]:
            first = [(None, (score.token_id, score.logprob)), *enumerate(score.top[:top], start=1)]
            return {
                str(id): {"logprob": _number(logprob), "rank": rank, "decoded_token": self.name(id)}
                for rank, (id, logprob) in first
            }

        return [None if score is None else ranked(score) for score in scores]


class Offsets:
    """The places of the tokens in one text, whose tokens come one after the other.

    A character lies where its first token does, and an incomplete one nowhere.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._offset = texts, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, ids: list[int], sent: str | None, scores: Iterable[Score | None], top: int
    ) -> dict[str, list[Any]]:
        """Return the scores of a prompt that the text begins with; its first token has none."""
        tokens = []
        for id, data, score in zip(ids, self._texts.echoed_tokens(ids, sent), scores, strict=False):
            unknown = Score(id, math.nan, math.nan, [], [])
            known = unknown if score is None else replace(score, top=score.top[:top])
            text = spelled(data) if self._texts.has_text else self._texts.name(id)
            tokens.append(ShownToken(known, text, data))
        found = self.logprobs(tokens)
        end = len(self._texts.echoed(ids, sent))
        # a tokenizer that changes what it reads gives tokens that are not the text to the letter
        found["text_offset"] = [min(offset, end) for offset in found["text_offset"]]
        self._offset = end
        return found

    def logprobs(self, tokens: Iterable[ShownToken]) -> dict[str, list[Any]]:
        """Return the scores of the next tokens as completions have them: each with its own among the top."""
        found: dict[str, list[Any]]
        found = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for token in tokens:
            score, text = token.score, spelled(token.data) if token.data else token.text
            top = {
                text if id == score.token_id else self._texts.name(id): _number(logprob)
                for id, logprob in score.top
            } | {text: _number(score.logprob)}
            found["tokens"].append(text)
            found["token_logprobs"].append(_number(score.logprob))
            found["top_logprobs"].append(None if math.isnan(score.logprob) else top)
            found["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return found


def spelled(data: bytes) -> str:
    r"""Return the text of bytes; where they are no whole characters, OpenAI's spelling of them.

    Examples:
        >>> spelled(b" a"), spelled(b"\xe2\x98")
        (' a', 'bytes:\\xe2\\x98')
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        shown = (chr(byte) if byte in PRINTABLE else f"\\x{byte:02x}" for byte in data)
        return f"bytes:{''.join(shown)}"


def _number(logprob: float) -> float | None:
    """Return a log-probability as JSON can hold it: null for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else max(logprob, LEAST)
