"""ByteCodec: the bytes that token ids stand for, and token ids for exactly given bytes.

Two tokenizers share nothing but the text. A token id adds a string of bytes to it, in byte-level vocabularies
often a part of a character. Decoding hides that (a cut character reads U+FFFD), and encoding may change a
text (a space in front, another Unicode form). A drafter that carries text from one tokenizer to another
therefore uses this codec, which gives the exact bytes or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tokenizers

from foredraft.model.kept_bytes import kept_bytes
from foredraft.model.tokenizer import Tokenizer, token_bytes

__all__ = ["ByteCodec", "characters"]

# Texts that few tokenizers merge with the letters behind them: a line break, and a character that hardly any
# text contains. A text encoded behind one of them gets no space in front.
ANCHORS = ("\n", "\N{OBJECT REPLACEMENT CHARACTER}")


class ByteCodec:
    """Maps one tokenizer's ids to bytes and back. All ids are within the vocabulary of the tokenizer's model.

    Attributes:
        prefix: Ids that the tokenizer puts before every text (BOS).
        pads: Whether the tokenizer puts a space before the first word of a text.
        specials: Special tokens: content -> id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        within = range(tokenizer.model_vocab_size)
        self._tokenizer = tokenizer
        self._literal = _literal(tokenizer)
        self._context = self.encode("a")
        self._tokens_before = [str(tokenizer.inner.id_to_token(id)) for id in self._context]
        self._before = tokenizer.text_of(self._tokens_before)
        self._bytes: dict[int, bytes | None] = {}
        self.specials = {str(tokenizer.inner.id_to_token(id)): id for id in tokenizer.special if id in within}
        self.prefix = [id for id in _before(tokenizer.encode("a"), self._context) if id in within]
        self.pads = self.join(self._context) == b" a"

    def of(self, id: int) -> bytes | None:
        """Return the bytes that an id adds to a text; None for special tokens and for ids without a token."""
        if id not in self._bytes:
            self._bytes[id] = self._look_up(id)
        return self._bytes[id]

    def table(self, size: int) -> list[bytes]:
        """Return the bytes of the ids from 0 to `size` - 1; an id that has none adds no byte."""
        if any(id not in self._bytes for id in range(size)):
            found = kept_bytes(self._tokenizer, size, lambda: map(self._look_up, range(size)))
            self._bytes.update(enumerate(found))
        return [self._bytes[id] or b"" for id in range(size)]

    def join(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids, up to the first id that has none."""
        parts: list[bytes] = []
        for id in ids:
            part = self.of(id)
            if part is None:
                break
            parts.append(part)
        return b"".join(parts)

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's own encoding of a whole text, without the prefix."""
        ids: list[int] = self._literal.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, text: str) -> list[int]:
        """Return ids of a text that continues another one.

        Their bytes are exactly the text's, to its end or as far as the tokenizer can express it.
        """
        data = text.encode()
        best: list[int] = []
        reached = -1  # bytes of the text that `best` covers
        for ids in self._attempts(text):
            kept = self._agreeing(ids, data)
            if (length := len(self.join(kept))) > reached:
                best, reached = kept, length
            if reached == len(data):
                break
        return best

    def _attempts(self, text: str) -> Iterator[list[int]]:
        """Yield encodings of a text: as it is, without its first space, and behind an anchor.

        The later ones are for tokenizers that put a space before every text that they encode.
        """
        yield self.encode(text)
        if text.startswith(" "):
            yield self.encode(text[1:])
        for anchor in ANCHORS:
            ids = self.encode(anchor + text)
            ends = (cut for cut in range(1, len(ids)) if self.join(ids[:cut]).endswith(anchor.encode()))
            yield ids[next(ends, len(ids)) :]

    def _agreeing(self, ids: list[int], data: bytes) -> list[int]:
        """Return the leading ids whose bytes are those of `data`."""
        place = 0
        for count, id in enumerate(ids):
            part = self.of(id)
            if part is None or not data.startswith(part, place):
                return ids[:count]
            place += len(part)
        return ids

    def _look_up(self, id: int) -> bytes | None:
        """Return the bytes of an id, as `of` does."""
        token = self._tokenizer.inner.id_to_token(id)
        if token is None or id in self._tokenizer.special:
            return None
        if self._tokenizer.byte_level:
            return token_bytes(token)
        byte = self._tokenizer.byte_of(token)
        if byte is not None:
            return byte
        after = self._tokenizer.text_of([*self._tokens_before, token])
        return after[len(self._before) :].encode() if after.startswith(self._before) else None


def characters(data: bytes) -> str:
    """Return the text of the whole characters with which `data` begins."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def _literal(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that reads names of special tokens, and of tokens beyond the model's, as plain text.

    It shares the tables of the given one, which would take seconds to copy.
    """
    inner, added = tokenizer.inner, tokenizer.inner.get_added_tokens_decoder()
    literal = tokenizers.Tokenizer(inner.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(inner, step)) is not None:
            setattr(literal, step, part)
    literal.add_tokens([added[id] for id in sorted(added) if id < tokenizer.model_vocab_size])
    literal.encode_special_tokens = True
    return literal


def _before(ids: list[int], text: list[int]) -> list[int]:
    """Return the ids of an encoding before the text's own ids."""
    for at in range(len(ids) - len(text) + 1):
        if ids[at : at + len(text)] == text:
            return ids[:at]
    return []
