"""Open characters: what the first bytes of a character can become, without a walk over all characters.

UTF-8 gives each byte after the first one six bits (RFC 3629, https://www.rfc-editor.org/rfc/rfc3629), so the
characters with the same first bytes are a range of code points, which begins and ends at a multiple of 64.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["cased_characters", "code_points", "is_word", "missing_bytes", "words_within"]

BLOCK = 64
FIRST_BITS = {2: 0x1F, 3: 0x0F, 4: 0x07}  # length of a character in bytes -> bits of its first byte
LEAST = {2: 0x80, 3: 0x800, 4: 0x10000}  # the first code point of that length
LAST, SURROGATES = 0x110000, range(0xD800, 0xE000)
CASED = 0x20000  # behind the last letter with a case


def is_word(character: str) -> bool:
    """Return whether a character belongs to words."""
    return character.isalnum() or character == "_"


def missing_bytes(pending: bytes) -> int:
    """Return how many bytes an incomplete character lacks."""
    return _length(pending) - len(pending)


def code_points(pending: bytes) -> range:
    """Return the code points of the characters that begin with these bytes, surrogates left out."""
    length = _length(pending)
    value = pending[0] & FIRST_BITS[length]
    for byte in pending[1:]:
        value = value << 6 | byte & 0x3F
    bits = 6 * (length - len(pending))
    first, stop = max(value << bits, LEAST[length]), min((value + 1) << bits, LAST)
    if stop - 1 in SURROGATES:  # only those of the bytes ED and ED A0 to ED BF
        stop = max(first, SURROGATES.start) if first < SURROGATES.start else first
    return range(first, stop)


def words_within(points: range) -> int:
    """Return how many characters of a range, as `code_points` gives it, belong to words."""
    counts = _words_before()
    return int(counts[points.stop // BLOCK] - counts[points.start // BLOCK])


@lru_cache(1)
def cased_characters() -> list[str]:
    """Return the characters that case folding changes."""
    each = map(chr, range(CASED))
    return [
        character for character in each if character.casefold() != character or character.lower() != character
    ]


def _length(pending: bytes) -> int:
    return 2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4


@lru_cache(1)
def _words_before() -> npt.NDArray[np.int64]:
    """Return the number of characters of words before each block of 64 code points."""
    words, every = np.zeros(LAST, dtype=bool), np.arange(LAST, dtype="<u4")
    # \w is the same as `is_word`, and a million calls would take 0.2 s
    for run in re.finditer(r"\w+", every.tobytes().decode("utf-32-le", "surrogatepass")):
        words[slice(*run.span())] = True
    return np.concatenate([[0], np.cumsum(words.reshape(-1, BLOCK).sum(1))])
