"""Scored text: the text of one sample with the scores and the sources of its tokens, while it comes.

The tokens that a reply lists, joined, are its text, in every part of a stream, because clients build their
text of them (https://github.com/guidance-ai/guidance/blob/main/guidance/models/_openai_base.py). Behind an
echo every token is listed, because clients count: they ask for a prompt and one token, and leave out the last
score (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/models/openai_completions.py).

A part of a character is spelled as OpenAI does in completions (`bytes:\\xe2\\x98`), so that the keys of
different tokens differ; in chats it is the text that it completes, beside its bytes.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from foredraft.decode.scores import Score
from foredraft.llm.output import Piece
from foredraft.model.byte_codec import ByteCodec
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve.blocks import BlockEvent, ShownToken

LEAST = -9999.0  # in place of minus infinity, which is no JSON
PRINTABLE = range(0x20, 0x7F)  # bytes that OpenAI's spelling of a part of a character shows as they are


class Provenance:
    def __init__(self, shown: Callable[[int], str]) -> None:
        self._shown = shown
        self._entries: list[dict[str, Any]] = []
        self._sent = 0

    def add(self, pieces: Iterable[Piece]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the entries that have become complete with further pieces, and their rounds."""
        final, rounds = self._sent, []
        for piece in pieces:
            none = None if piece.parts is None else ""
            for token, origin in zip(piece.token_ids, piece.origins, strict=True):
                self._entries.append({"token_id": token, "origin": origin, "text": none})
            for index, text in piece.parts or ():
                self._entries[index]["text"] += text
                final = index  # the last token with text may get more
            if piece.parts is None or piece.output is not None:
                final = len(self._entries)
            for trace in piece.trace or ():  # those of its tokens that were rejected are in no other field
                after = None if trace.after_sibling is None else self._shown(trace.after_sibling)
                drafted, next_ = [self._shown(token) for token in trace.draft], self._shown(trace.next_token)
                texts = {"draft_texts": drafted, "next_text": next_, "after_text": after}
                rounds.append(asdict(trace) | texts)
        entries, self._sent = self._entries[self._sent : final], final
        return entries, rounds


@dataclass(slots=True)
class _Token:
    """A token whose place in the text is not known yet."""

    score: Score  # its scores
    data: bytes  # its bytes; none where texts leave it out
    own: str  # the characters that its bytes complete after those of the tokens before it
    open: int  # bytes that begin a character at its end
    text: str = ""  # what the text has got by it so far


class ScoredText:
    def __init__(self, texts: TokenTexts, *, hides: bool, counts: bool = False) -> None:
        self._texts, self._hides, self._counts = texts, hides, counts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[_Token] = []  # whose text is not whole yet
        self._first = 0  # the index of the first of them among the new tokens
        self._whole: list[ShownToken] = []  # whose text is whole, and whose block is not known yet
        self._text = ""  # of all tokens that are whole
        self._start = 0  # where in the text the first token of `_whole` begins
        self._read = 0  # where in the text the blocks are
        self._content: list[tuple[int, int, int]] = []  # begin, end and block of the parts that are content

    def add(self, pieces: Sequence[Piece]) -> str:
        """Take further pieces; return the text that they add, up to the end of a token."""
        begun = len(self._text)
        for piece in pieces:
            for score in piece.logprobs or ():
                data = self._texts.data(score.token_id, hides=self._hides)
                own = self._decoder.decode(data)
                self._tokens.append(_Token(score, data, own, len(self._decoder.getstate()[0])))
            for index, text in piece.parts or ():
                self._tokens[max(0, index - self._first)].text += text
        output = pieces[-1].output
        if not self._texts.has_text:
            ended = output is not None and output.finish_reason == "eos" and not self._counts
            taken = self._tokens[:-1] if ended else self._tokens
            self._whole += [
                ShownToken(each.score, self._texts.name(each.score.token_id), b"") for each in taken
            ]
            self._tokens = []
            return ""
        count = len(self._tokens) if output is not None else self._count_whole()
        group, self._tokens = self._tokens[:count], self._tokens[count:]
        self._first += count
        self._text += "".join(token.text for token in group)
        whole = list(_shown(group, ended=output is not None))
        self._whole += _counted(group, whole) if self._counts else whole
        return self._text[begun:]

    def shown(self, steps: list[BlockEvent], *, ended: bool) -> list[ShownToken]:
        """Return the further tokens of the content, each once it is known to be content."""
        if not self._texts.has_text:
            whole, self._whole = self._whole, []
            return whole
        for step in steps:
            self._place(step)
        known = len(self._text) if ended else self._read
        found, told = list[ShownToken](), 0
        for end, token in enumerate(self._whole, start=1):
            if self._start + len(token.text) > known:
                break
            if token.text:  # those before it that have none begin its character
                found += self._in_content(self._whole[told:end])
                self._start, told = self._start + len(token.text), end
        del self._whole[:told]
        return found + (self._whole if ended and self._counts else [])

    def _count_whole(self) -> int:
        """Return the number of tokens up to the last one that has all its characters, or text behind it."""
        goes_on = False
        for count in range(len(self._tokens), 0, -1):
            token = self._tokens[count - 1]
            if token.text and (goes_on or len(token.text) >= len(token.own)):
                return count
            goes_on = goes_on or bool(token.text)
        return 0

    def _place(self, step: BlockEvent) -> None:
        """Find a step in the text: blocks show parts of it one after the other, without the markup."""
        if step.kind != "delta":
            return
        at = self._text.find(step.text, self._read)
        if at < 0:
            return
        self._read = at + len(step.text)
        if step.block.is_content:
            goes_on = self._content and self._content[-1][1:] == (at, step.block.index)
            begin = self._content.pop()[0] if goes_on else at
            self._content.append((begin, self._read, step.block.index))

    def _in_content(self, group: list[ShownToken]) -> Iterator[ShownToken]:
        """Yield tokens of one character or more as far as they are content."""
        *begun, last = group
        start, end = self._start, self._start + len(last.text)
        self._content = [each for each in self._content if each[1] > start]
        for begin, stop, block in self._content:
            low, high = max(begin, start), min(stop, end)
            if low >= high:
                continue
            if low == start:
                yield from (replace(each, block=block) for each in begun)
            text = last.text[low - start : high - start]
            data = last.data if text == last.text else text.encode()
            yield ShownToken(last.score, text, data, block)


def _shown(group: list[_Token], *, ended: bool) -> Iterator[ShownToken]:
    """Yield tokens as the text has them; those that it has no character of are left out."""
    texted = [place for place, token in enumerate(group, start=1) if token.text]
    for begin, end in pairwise([0, *texted]):
        yield from _at_once(group[begin:end], cut=ended and end == texted[-1])


def _at_once(group: list[_Token], *, cut: bool) -> Iterator[ShownToken]:
    """Yield tokens whose text came with the last of them."""
    text, own = group[-1].text, "".join(token.own for token in group)
    if not own.startswith(text):  # its decoder does more than to join bytes
        yield ShownToken(group[-1].score, text, text.encode())
        return
    left = len(text)
    for token in group:
        if not left:
            return
        kept, missing = token.own[:left], token.own[left:].encode()
        left -= len(kept)
        beyond = len(missing) + (token.open if cut and not left else 0)
        if token.data:
            yield ShownToken(token.score, kept, token.data[: max(0, len(token.data) - beyond)])


def _counted(group: list[_Token], shown: list[ShownToken]) -> Iterator[ShownToken]:
    """Yield as many tokens as a group has: those that are shown, and the others without text."""
    known = {id(token.score): token for token in shown}
    for each in group:
        yield known.get(id(each.score), ShownToken(each.score, "", b""))


class TokenTexts:
    """The text and the bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._codec = None if tokenizer is None else ByteCodec(tokenizer)
        self._bytes = [] if self._codec is None else self._codec.table(vocabulary)

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def data(self, id: int, *, hides: bool = False) -> bytes:
        """Return a token's bytes; those of its name where it is a special one that texts do not hide."""
        if self._tokenizer is None or (hides and id in self._tokenizer.special):
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
