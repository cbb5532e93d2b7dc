"""Translation: the text of a growing sequence, kept in another tokenizer's tokens.

The text is cut into chunks, and each chunk is encoded by itself. A cut depends only on the text before it and
on one character behind it. So a closed chunk never changes, only the last chunk is encoded again when the
text grows, and the result is the same whether the text came at once or token by token.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.model.byte_codec import ByteCodec

__all__ = ["Translation"]

# Characters of a chunk: it ends before the first word that begins after SHORT, and at LONG at the latest.
# Longer chunks leave fewer cuts, shorter ones leave less to encode again in every round.
SHORT, LONG = 64, 256


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The state after a chunk was closed, to roll back to.

    Attributes:
        tokens: Source tokens that were read.
        ids: Reader ids of all closed chunks.
        rest: Text of the open chunk.
        held: Bytes of an incomplete character.
        begun: Whether there is text before the open chunk.
    """

    tokens: int
    ids: int
    rest: str
    held: bytes
    begun: bool


class Translation:
    """Reads tokens of one tokenizer and gives the tokens of another one for the same text.

    Args:
        source: Codec of the tokens that are read.
        reader: Codec of the tokens that `tokens` returns.

    Attributes:
        held: Bytes of an incomplete character at the end of the text; `tokens` does not cover them.
    """

    def __init__(self, source: ByteCodec, reader: ByteCodec) -> None:
        self._source, self._reader = source, reader
        self._shared_specials = {
            id: reader.specials[content]
            for content, id in source.specials.items()
            if content in reader.specials
        }
        self._closed: list[int] = list(reader.prefix)  # ids of the closed chunks
        self._checkpoints: list[_Checkpoint] = []
        self._count = 0  # source tokens that were read
        self._open = ""  # text of the open chunk
        self.held = b""
        self._begun = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the tokens of the sequence that were not read yet."""
        if not self._checkpoints:  # the reader has its own BOS
            prefix = self._source.prefix
            self._count = len(prefix) if list(tokens[: len(prefix)]) == prefix else 0
            self._save()
        data = bytearray()
        for token in tokens[self._count :]:
            self._count += 1
            part = self._source.of(token)
            if part is not None:
                data += part
                continue
            self._read(bytes(data))
            data.clear()
            self._read_special(token)
        self._read(bytes(data))

    def keep(self, count: int) -> None:
        """Roll back to the first `count` source tokens or a few fewer; `extend` reads those again."""
        if count >= self._count:
            return
        while len(self._checkpoints) > 1 and self._checkpoints[-1].tokens > count:
            self._checkpoints.pop()
        last = self._checkpoints[-1]
        del self._closed[last.ids :]
        self._count, self._open, self.held, self._begun = last.tokens, last.rest, last.held, last.begun

    def tokens(self) -> list[int]:
        """Return the reader's ids of the text so far, without the held bytes."""
        return self._closed + self._encoded(self._open)

    def _read(self, data: bytes) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open += decoder.decode(self.held + data)
        self.held = decoder.getstate()[0]
        while (cut := _cut(self._open)) is not None:
            self._close(self._open[:cut])
            self._open = self._open[cut:]
            self._save()

    def _read_special(self, token: int) -> None:
        """Close the chunk and add the reader's special token of the same name, if it has one."""
        self._close(self._open + self.held.decode(errors="replace"))
        self._open, self.held = "", b""
        if token in self._shared_specials:
            self._closed.append(self._shared_specials[token])
        self._save()

    def _close(self, text: str) -> None:
        self._closed += self._encoded(text)
        self._begun = self._begun or bool(text)

    def _save(self) -> None:
        self._checkpoints.append(
            _Checkpoint(self._count, len(self._closed), self._open, self.held, self._begun)
        )

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        if not self._begun:  # a space that the source's tokenizer put in front does not belong to the text
            return self._reader.encode(text.removeprefix(" ") if self._source.pads else text)
        ids = self._reader.spell(text)
        return ids if self._reader.join(ids) == text.encode() else self._reader.encode(text)


def _cut(text: str) -> int | None:
    """Return where the first chunk of `text` ends; None while that is not certain."""
    for at in range(SHORT, min(len(text) - 1, LONG)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return LONG if len(text) > LONG else None
