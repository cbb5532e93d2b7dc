"""Scored text: the text of one sample with the scores and the sources of its tokens, while it comes.

The tokens that a reply lists, joined, are its text, in every part of a stream, because clients build their
text of them (https://github.com/guidance-ai/guidance/blob/main/guidance/models/_openai_base.py). Behind an
echo every token is listed, because clients count: they ask for a prompt and one token, and leave out the last
score (https://github.com/EleutherAI/lm-evaluation-harness/blob/main/lm_eval/models/openai_completions.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

from foredraft.decode.scores import Score
from foredraft.llm.output import Piece
from foredraft.serve.blocks import BlockEvent


class Provenance:
    """The provenance of one sample, while it comes."""

    def __init__(self, shown: Callable[[int], str]) -> None:
        self._shown = shown
        self._entries: list[dict[str, Any]] = []
        self._sent = 0

    def add(self, pieces: Iterable[Piece]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the entries that have become complete with further pieces, and their rounds."""
        final, rounds = self._sent, []
        for piece in pieces:
            for token, origin in zip(piece.token_ids, piece.origins, strict=True):
                text = None if piece.parts is None else ""
                self._entries.append({"token_id": token, "origin": origin, "text": text})
            for index, text in piece.parts or ():
                self._entries[index]["text"] = (self._entries[index]["text"] or "") + text
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


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token as the text of a reply has it."""

    score: Score  # of the whole token
    text: str  # the text that it completes, as far as the reply has it; "" where it only begins a character
    data: bytes  # its bytes, as far as the reply has them
    block: int = 0  # the index of the block that it is in


class Texts(Protocol):
    """What scored texts ask of `TokenTexts`."""

    @property
    def has_text(self) -> bool: ...

    def is_special(self, id: int) -> bool: ...

    def data(self, id: int) -> bytes: ...

    def name(self, id: int) -> str: ...


@dataclass(slots=True)
class _Token:
    """A token whose place in the text is not known yet."""

    score: Score  # its scores
    data: bytes  # its bytes; none where texts leave it out
    own: str  # the characters that its bytes complete after those of the tokens before it
    open: int  # bytes that begin a character at its end
    text: str = ""  # what the text has got by it so far


class ScoredText:
    """The scored text of one sample."""

    def __init__(self, texts: Texts, *, hides: bool, counts: bool = False) -> None:
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
            self._tokens += [self._token(score) for score in piece.logprobs or ()]
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
        found: list[ShownToken] = []
        told = 0
        begun: list[ShownToken] = []  # without text: they begin the character of the next token that has some
        for token in self._whole:
            if self._start + len(token.text) > known:
                break
            begun.append(token)
            if token.text:
                found += self._in_content(begun)
                self._start += len(token.text)
                told += len(begun)
                begun = []
        del self._whole[:told]
        return found + (self._whole if ended and self._counts else [])

    def _token(self, score: Score) -> _Token:
        id = score.token_id
        data = b"" if self._hides and self._texts.is_special(id) else self._texts.data(id)
        own = self._decoder.decode(data)
        return _Token(score, data, own, len(self._decoder.getstate()[0]))

    def _count_whole(self) -> int:
        """Return the number of tokens up to the last one that has all its characters, or text behind it."""
        count = len(self._tokens)
        goes_on = False
        while count:
            token = self._tokens[count - 1]
            if token.text and (goes_on or len(token.text) >= len(token.own)):
                return count
            goes_on = goes_on or bool(token.text)
            count -= 1
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
        last = end == texted[-1]
        yield from _at_once(group[begin:end], cut=ended and last)


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
