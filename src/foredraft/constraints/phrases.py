"""Phrases: an automaton that finds banned text however it is cut into tokens and bytes (Aho and Corasick
1975).

A text becomes a string of *symbols*: characters, folded where case does not count. Where only whole words
count, a boundary stands beside every character that is no word character and at both ends of the text, and a
pattern is a phrase between two boundaries. A token may end within a character, whose bytes wait in the state.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.decode.text_buffer import Automaton

FIRST_BITS = {2: 0x1F, 3: 0x0F, 4: 0x07}  # length of a character in bytes -> bits of its first byte
LEAST = {2: 0x80, 3: 0x800, 4: 0x10000}  # the first code point of that length
LAST, SURROGATES = 0x110000, range(0xD800, 0xE000)
CASED = 0x20000  # behind the last letter with a case
BOUNDARY = "\ud800"  # a lone surrogate: no text contains it
BETWEEN = "\ud802"  # another one, between texts that become symbols in one call
ROOT = 0


def missing_bytes(pending: bytes) -> int:
    """Return how many bytes an incomplete character lacks."""
    return (2 if pending[0] < 0xE0 else 3 if pending[0] < 0xF0 else 4) - len(pending)


def code_points(pending: bytes) -> range:
    """Return the code points of the characters that begin with these bytes, surrogates left out."""
    missing = missing_bytes(pending)
    length, bits = len(pending) + missing, 6 * missing
    value = pending[0] & FIRST_BITS[length]
    for byte in pending[1:]:
        value = value << 6 | byte & 0x3F
    first, stop = max(value << bits, LEAST[length]), min((value + 1) << bits, LAST)
    if stop - 1 in SURROGATES:  # only those of the bytes ED and ED A0 to ED BF
        stop = max(first, SURROGATES.start) if first < SURROGATES.start else first
    return range(first, stop)


@lru_cache(1)
def cased_characters() -> list[str]:
    each = map(chr, range(CASED))
    return [
        character for character in each if character.casefold() != character or character.lower() != character
    ]


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


@lru_cache(1)
def word_characters() -> npt.NDArray[np.bool_]:
    """Return `is_word` of every code point."""
    words, every = np.zeros(LAST, dtype=bool), np.arange(LAST, dtype="<u4")
    # \w is the same, and a million calls would take 0.2 s
    for run in re.finditer(r"\w+", every.tobytes().decode("utf-32-le", "surrogatepass")):
        words[slice(*run.span())] = True
    return words


class Symbols(dict[int, str]):
    """Maps characters to symbols, for `str.translate`."""

    def __init__(self, *, ignore_case: bool, whole_words: bool) -> None:
        super().__init__({ord(BETWEEN): BETWEEN})
        self.ignore_case, self.whole_words = ignore_case, whole_words
        self.edge = BOUNDARY if whole_words else ""  # what the end of a text adds

    def __missing__(self, code: int) -> str:
        character = chr(code)
        symbol = character
        if self.ignore_case:
            folded = (character.casefold(), character.lower())
            symbol = next((each for each in folded if len(each) == 1), character)
        if self.whole_words and not is_word(character):
            symbol = f"{BOUNDARY}{symbol}{BOUNDARY}"
        self[code] = symbol
        return symbol

    def of(self, text: str) -> str:
        return text.translate(self)

    def of_each(self, texts: Seq[str]) -> list[str]:
        """Return the symbols of each of several texts, one or more."""
        if not self.ignore_case and not self.whole_words:
            return [*texts]
        return BETWEEN.join(texts).translate(self).split(BETWEEN)


class PhraseState(NamedTuple):
    """Where an automaton stands: a node, and the bytes of an incomplete character."""

    node: int = ROOT
    pending: bytes = b""


class PhraseAutomaton(Automaton):
    """Finds banned phrases in a growing text."""

    def __init__(self, phrases: Seq[str], symbols: Symbols, endings: Seq[str] = ()) -> None:
        self.symbols = symbols  # how text becomes symbols
        patterns = {symbols.edge + symbols.of(phrase) + symbols.edge for phrase in phrases}
        if symbols.whole_words:
            ends = [end for ending in endings if not (end := symbols.of(ending)).startswith(BOUNDARY)]
            patterns |= {pattern[:-1] + end for pattern in [*patterns] for end in ends}
        self.patterns = sorted(patterns)
        super().__init__(self.patterns)
        self.below = [range(0)] * len(self.depth)  # of each node, the patterns that begin as it does
        for place, pattern in enumerate(self.patterns):
            node = ROOT
            for symbol in pattern:
                node = self._next[node][symbol]
                self.below[node] = range(self.below[node].start if self.below[node] else place, place + 1)
        self.below[ROOT] = range(len(self.patterns))
        self.shortest = [0] * len(self.depth)  # of each node, the length of the shortest pattern it ends with
        for node in self.ordered:
            self.shortest[node] = self.shortest[self.fallback[node]] or len(self.ends.get(node, ""))
        self.start = PhraseState(self.step(ROOT, symbols.edge) if symbols.whole_words else ROOT)

    def walk(self, node: int, symbols: str) -> int:
        for symbol in symbols:
            node = self.step(node, symbol)
        return node

    def search(self, node: int, symbols: str) -> int | None:
        """Return which of `symbols` begins the first phrase that they complete; below 0: an earlier one."""
        for count, symbol in enumerate(symbols, start=1):
            node = self.step(node, symbol)
            if length := self.shortest[node]:
                return count - length + self.symbols.whole_words
        return None

    def completes(self, node: int, symbols: str) -> bool:
        """Return whether a pattern is complete within `symbols` after `node`."""
        return self.search(node, symbols) is not None

    def decoded(self, pending: bytes, text: bytes) -> tuple[str, bytes]:
        """Return the symbols that bytes complete, and the bytes of an incomplete character behind them."""
        data = pending + text
        characters, used = codecs.utf_8_decode(data, "replace", False)
        return self.symbols.of(characters), data[used:]

    def after(self, text: bytes) -> PhraseState:
        """Return the state after a prompt."""
        symbols, pending = self.decoded(b"", text)
        return PhraseState(self.walk(self.start.node, symbols), pending)
