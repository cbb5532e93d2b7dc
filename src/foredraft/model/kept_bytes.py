"""The bytes of all ids of a vocabulary, kept in the user's cache folder between runs.

Contract: the table depends on the tokenizer, on how many ids its model has, on the `tokenizers` library that
decodes, and on the rule of `ByteCodec`; the key holds all of these. A file whose lengths do not add up counts
as missing, as a damaged one does. Small tables are not kept, since making one takes no time; of the others
the newest `MAX_TABLES`.

A file holds the length of each id's bytes, as int32 in little-endian order, and then the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import tokenizers

from foredraft import user_cache
from foredraft.model.tokenizer import Tokenizer

__all__ = ["kept_bytes"]

KIND, SUFFIX = "vocabularies", ".bytes"  # of the user's cache
RULE = 1  # raised when `ByteCodec` finds other bytes
MIN_IDS = 2**14  # of a table that is kept: as many are looked up in some 30 ms
MAX_TABLES = 16  # of 3 MB for 262,144 ids
NO_BYTES = -1  # the length of an id that adds nothing to a text

Bytes = Sequence["bytes | None"]


def kept_bytes(tokenizer: Tokenizer, size: int, make: Callable[[], Iterable[bytes | None]]) -> Bytes:
    """Return the bytes of the ids below `size`, from the cache where it holds them.

    Args:
        tokenizer: The tokenizer.
        size: Ids of the table.
        make: Returns the bytes of each id; None for ids that add nothing to a text.
    """
    if size < MIN_IDS:
        return [*make()]
    key = {
        "rule": RULE,
        "tokenizers": tokenizers.__version__,
        "tokenizer": tokenizer.digest,
        "ids": tokenizer.model_vocab_size,
        "size": size,
    }
    content = user_cache.read_bytes(KIND, key, SUFFIX)
    if content is not None and (kept := _unpacked(content, size)) is not None:
        return kept
    made = [*make()]
    user_cache.write_bytes(KIND, key, SUFFIX, _packed(made))
    user_cache.keep_newest(KIND, SUFFIX, MAX_TABLES)
    return made


def _packed(table: Bytes) -> bytes:
    lengths = np.array([NO_BYTES if each is None else len(each) for each in table], dtype="<i4")
    return lengths.tobytes() + b"".join(each for each in table if each is not None)


def _unpacked(content: bytes, size: int) -> Bytes | None:
    """Return the table in a file; None where `_packed` cannot have written it."""
    if len(content) < 4 * size:
        return None
    lengths, data = np.frombuffer(content, dtype="<i4", count=size), content[4 * size :]
    ends = np.cumsum(np.maximum(lengths, 0), dtype=np.int64)
    if int(lengths.min()) < NO_BYTES or int(ends[-1]) != len(data):
        return None
    table: list[bytes | None] = [data[start:end] for start, end in pairwise([0, *ends.tolist()])]
    for id in np.flatnonzero(lengths == NO_BYTES).tolist():
        table[id] = None
    return table
