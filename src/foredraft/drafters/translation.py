"""Translation: the text of a growing sequence, kept in another tokenizer's tokens.

The text is cut into chunks that are encoded one by one, and where it is cut depends on nothing but the text
before the cut and one character behind it. So what is encoded once stays, however the text goes on, only the
last chunk is encoded again, and a translation is the same whether the text came at once or token by token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.drafters.byte_codec import ByteCodec

__all__ = ["Translation"]

# A chunk has this many characters, and then ends before the next word, or at the latest after that many.
SHORT, LONG = 64, 256


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a chunk was closed: after so many of the source's tokens, with so many ids of the closed ones.

    rest, held: what the tokens had beyond it. begun: whether there is text before it.
    """

    tokens: int
    ids: int
    rest: str
    held: bytes
    begun: bool


class Translation:
    """source: whose tokens come in; reader: whose ids `tokens` gives.

    held: bytes at the text's end that are no whole character yet; they are in no token.
    """

    def __init__(self, source: ByteCodec, reader: ByteCodec) -> None:
        self._source, self._reader = source, reader
        self._shared = {
            id: reader.specials[content]
            for content, id in source.specials.items()
            if content in reader.specials
        }
        self._closed: list[int] = list(reader.prefix)
        self._marks: list[_Mark] = []
        self._count = 0  # of the source's tokens that are in
        self._open = ""
        self.held = b""
        self._begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens` has beyond what is known of it."""
        if not self._marks:  # BOS is the reader's own
            prefix = self._source.prefix
            self._count = len(prefix) if list(tokens[: len(prefix)]) == prefix else 0
            self._mark()
        data = bytearray()
        for token in tokens[self._count :]:
            self._count += 1
            part = self._source.of(token)
            if part is not None:
                data += part
                continue
            self._read(bytes(data))
            data.clear()
            self._special(token)
        self._read(bytes(data))

    def keep(self, count: int) -> None:
        """Forget all but the first `count` of the source's tokens; the next `extend` has them again."""
        if count >= self._count:
            return
        while len(self._marks) > 1 and self._marks[-1].tokens > count:
            self._marks.pop()
        mark = self._marks[-1]
        del self._closed[mark.ids :]
        self._count, self._open, self.held, self._begun = mark.tokens, mark.rest, mark.held, mark.begun

    def tokens(self) -> list[int]:
        """The reader's ids of the text so far, less what is held."""
        return self._closed + self._encoded(self._open)

    def _read(self, data: bytes) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open += decoder.decode(self.held + data)
        self.held = decoder.getstate()[0]
        while (cut := _cut(self._open)) is not None:
            self._close(self._open[:cut])
            self._open = self._open[cut:]
            self._mark()

    def _special(self, token: int) -> None:
        """A special token is no text: it goes over under its name, or not at all."""
        self._close(self._open + self.held.decode(errors="replace"))
        self._open, self.held = "", b""
        if token in self._shared:
            self._closed.append(self._shared[token])
        self._mark()

    def _close(self, text: str) -> None:
        self._closed += self._encoded(text)
        self._begun = self._begun or bool(text)

    def _mark(self) -> None:
        self._marks.append(_Mark(self._count, len(self._closed), self._open, self.held, self._begun))

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        if not self._begun:  # the space that the source put in front is no part of the text
            return self._reader.encode(text.removeprefix(" ") if self._source.pads else text)
        ids = self._reader.spell(text)
        return ids if self._reader.join(ids) == text.encode() else self._reader.encode(text)


def _cut(text: str) -> int | None:
    """Where the chunk that `text` begins with ends, once that is certain."""
    for at in range(SHORT, min(len(text) - 1, LONG)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return LONG if len(text) > LONG else None
