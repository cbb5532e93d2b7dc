"""`ByteCodec`: the bytes that token ids stand for, kept in the user's cache folder, and ids for given bytes.

Two tokenizers share nothing but the text, which decoding and encoding may change. A drafter that carries text
from one to another uses this codec, which gives the exact bytes or nothing.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator, Sequence

import tokenizers

from foredraft import user_cache
from foredraft.model.tokenizer import Tokenizer, token_bytes

KIND, SUFFIX = "vocabularies", ".bytes"  # of the user's cache
RULE = 2  # raised when `ByteCodec` finds other bytes, or they are kept otherwise
MIN_IDS = 2**14  # of a table that is kept: as many are looked up in some 30 ms
MAX_TABLES = 16  # of 3 MB for 262,144 ids

Bytes = Sequence["bytes | None"]


def kept_bytes(tokenizer: Tokenizer, size: int, make: Callable[[], Iterable[bytes | None]]) -> Bytes:
    """Return the bytes of the ids below `size`, from the cache where it holds them."""
    if size < MIN_IDS:
        return [*make()]
    key = {
        "rule": RULE,
        "format": marshal.version,
        "tokenizers": tokenizers.__version__,
        "tokenizer": tokenizer.digest,
        "ids": tokenizer.model_vocab_size,
        "size": size,
    }
    content = user_cache.read_bytes(KIND, key, SUFFIX)
    if content is not None:
        kept: Bytes = marshal.loads(content)  # of the same trust as the kernels that lie beside it
        return kept
    made = [*make()]
    user_cache.write_bytes(KIND, key, SUFFIX, marshal.dumps(made))
    user_cache.keep_newest(KIND, SUFFIX, MAX_TABLES)
    return made


# Texts that few tokenizers merge with the letters behind them, in front of which they put no space.
ANCHORS = ("\n", "\N{OBJECT REPLACEMENT CHARACTER}")


class ByteCodec:
    """Maps one tokenizer's ids to bytes and back. All ids are within the model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        within = range(tokenizer.model_vocab_size)
        self._tokenizer = tokenizer
        self._literal = _literal(tokenizer)
        self._context = self.encode("a")
        self._tokens_before = [str(tokenizer.inner.id_to_token(id)) for id in self._context]
        self._before = tokenizer.text_of(self._tokens_before)
        self._bytes: dict[int, bytes | None] = {}
        self.specials = {str(tokenizer.inner.id_to_token(id)): id for id in tokenizer.special if id in within}
        whole, size = tokenizer.encode("a"), len(self._context)
        places = (at for at in range(len(whole) - size + 1) if whole[at : at + size] == self._context)
        self.prefix = [id for id in whole[: next(places, 0)] if id in within]  # (BOS)
        self.pads = self.join(self._context) == b" a"  # a space in front

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
        """Return ids of a text that continues another one, as far as ids can express exactly its bytes."""
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
        """Yield encodings of a text: as it is, and for tokenizers that put a space before every text."""
        yield self.encode(text)
        if text.startswith(" "):
            yield self.encode(text[1:])
        for anchor in ANCHORS:
            ids = self.encode(anchor + text)
            ends = (cut for cut in range(1, len(ids)) if self.join(ids[:cut]).endswith(anchor.encode()))
            yield ids[next(ends, len(ids)) :]

    def _agreeing(self, ids: list[int], data: bytes) -> list[int]:
        place = 0
        for count, id in enumerate(ids):
            part = self.of(id)
            if part is None or not data.startswith(part, place):
                return ids[:count]
            place += len(part)
        return ids

    def _look_up(self, id: int) -> bytes | None:
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
    """Return a tokenizer of the same tables to which special tokens, and any beyond the model's, are text."""
    inner, added = tokenizer.inner, tokenizer.inner.get_added_tokens_decoder()
    literal = tokenizers.Tokenizer(inner.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(inner, step)) is not None:
            setattr(literal, step, part)
    literal.add_tokens([added[id] for id in sorted(added) if id < tokenizer.model_vocab_size])
    literal.encode_special_tokens = True
    return literal
