"""Phrases: an automaton that finds banned text however it is cut into tokens and bytes (Aho and Corasick
1975).

A text becomes a string of *symbols*: characters, folded where case does not count. Where only whole words
count, a boundary stands beside every character that is no word character and at both ends of the text, and a
pattern is a phrase between two boundaries. A token may end within a character, whose bytes wait in the state.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foredraft.constraints.token_table import TokenTable
from foredraft.decode.text_buffer import Automaton

BLOCK = 64
FIRST_BITS = {2: 0x1F, 3: 0x0F, 4: 0x07}  # length of a character in bytes -> bits of its first byte
LEAST = {2: 0x80, 3: 0x800, 4: 0x10000}  # the first code point of that length
LAST, SURROGATES = 0x110000, range(0xD800, 0xE000)
CASED = 0x20000  # behind the last letter with a case


def is_word(character: str) -> bool:
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


BOUNDARY = "\ud800"  # a lone surrogate: no text contains it
BETWEEN = "\ud802"  # another one, between texts that become symbols in one call
ROOT = 0


class Symbols(dict[int, str]):
    """Maps characters to symbols, for `str.translate`."""

    def __init__(self, *, ignore_case: bool, whole_words: bool) -> None:
        super().__init__({ord(BETWEEN): BETWEEN})
        self.ignore_case, self.whole_words = ignore_case, whole_words

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

    def pattern(self, phrase: str) -> str:
        """Return the symbols that a text with the phrase contains."""
        edge = BOUNDARY if self.whole_words else ""
        return edge + self.of(phrase) + edge


class PhraseState(NamedTuple):
    """Where an automaton stands: a node, and the bytes of an incomplete character."""

    node: int = ROOT
    pending: bytes = b""


class PhraseAutomaton(Automaton):
    """Finds banned phrases in a growing text."""

    def __init__(self, phrases: Seq[str], symbols: Symbols, endings: Seq[str] = ()) -> None:
        self.symbols = symbols  # how text becomes symbols
        patterns = {symbols.pattern(phrase) for phrase in phrases}
        if symbols.whole_words:
            patterns |= {
                pattern[:-1] + symbols.of(ending)
                for pattern in list(patterns)
                for ending in endings
                if not symbols.of(ending).startswith(BOUNDARY)
            }
        self.patterns = sorted(patterns)  # all patterns, sorted
        super().__init__(self.patterns)
        self.shortest = [0] * len(
            self.depth
        )  # of a node: the length of the shortest pattern that it ends with
        for node in self.ordered:
            self.shortest[node] = self.shortest[self.fallback[node]] or len(self.ends.get(node, ""))
        self.start = PhraseState(self.step(ROOT, BOUNDARY) if symbols.whole_words else ROOT)

    def walk(self, node: int, symbols: str) -> int:
        for symbol in symbols:
            node = self.step(node, symbol)
        return node

    def path(self, pattern: str) -> list[int]:
        """Return the nodes of a pattern's beginnings, the root left out."""
        nodes, node = [], ROOT
        for symbol in pattern:
            node = self._next[node][symbol]
            nodes.append(node)
        return nodes

    def decoded(self, pending: bytes, text: bytes) -> tuple[str, bytes]:
        """Return the symbols that bytes complete, and the bytes of an incomplete character behind them."""
        data = pending + text
        characters, used = codecs.utf_8_decode(data, "replace", False)
        return self.symbols.of(characters), data[used:]

    def broken(self, pending: bytes) -> str:
        """Return the symbols of an incomplete character that no further byte completes."""
        return self.symbols.of(pending.decode("utf-8", "replace"))

    def completes(self, node: int, symbols: str) -> bool:
        """Return whether a pattern is complete within `symbols` after `node`."""
        for symbol in symbols:
            node = self.step(node, symbol)
            if self.shortest[node]:
                return True
        return False

    @property
    def end_symbols(self) -> str:
        """The symbols that the end of a text adds; an incomplete character there adds none."""
        return BOUNDARY if self.symbols.whole_words else ""

    def suffixes(self, node: int) -> list[int]:
        """Return the nodes of all suffixes of the text at `node` that begin a pattern, the root left out."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.fallback[node]
        return nodes


KEPT_MOVES = 1 << 16  # some 20 MB: a text makes the same moves again, and a round walks a draft twice


class Move(NamedTuple):
    """What a token does to a state."""

    state: PhraseState  # afterwards
    symbols: int  # the number that the token adds
    joined: int  # how many of them are of a character that began before the token
    waits: bool  # the token adds bytes to a character that began before it, which is still incomplete
    # the symbol with which the first complete phrase begins, counted from the first that the token adds
    found: int | None


class TokenAutomaton:
    """A phrase automaton over a vocabulary; sequences share it."""

    def __init__(self, phrases: PhraseAutomaton, table: TokenTable) -> None:
        self.phrases, self.table = phrases, table
        self._moves: dict[tuple[PhraseState, int, bool], Move] = {}

    def read(self, state: PhraseState, token: int, last: bool = False) -> Move:
        """Return the move of a token; last: the text ends with it."""
        key = state, token, last
        move = self._moves.get(key)
        if move is None:
            if len(self._moves) >= KEPT_MOVES:
                self._moves.clear()
            move = self._moves[key] = self._move(*key)
        return move

    def _move(self, state: PhraseState, token: int, last: bool) -> Move:
        phrases, text = self.phrases, self.table.texts[token]
        symbols, pending = phrases.decoded(state.pending, text)
        joined = 0
        if state.pending:  # the symbols of the first character
            characters, _ = codecs.utf_8_decode(state.pending + text, "replace", False)
            joined = len(phrases.symbols.of(characters[:1]))
        waits = bool(state.pending) and not symbols
        if last or token in self.table.ends:
            symbols += phrases.end_symbols
        node, found = self.search(state.node, symbols)
        return Move(PhraseState(node, pending), len(symbols), joined, waits, found)

    def search(self, node: int, symbols: str) -> tuple[int, int | None]:
        """Return the node after more symbols, and the symbol with which the first phrase in them begins."""
        phrases, found = self.phrases, None
        for count, symbol in enumerate(symbols, start=1):
            node = phrases.step(node, symbol)
            if found is None and (length := phrases.shortest[node]):
                found = count - length + phrases.symbols.whole_words
        return node, found


class _Step(NamedTuple):
    """Where a text stands after some tokens."""

    state: PhraseState  # of the automaton
    emitted: int  # symbols of all these tokens
    begun: int  # the token with the first byte of an incomplete character; -1 where it is in the prompt
    joined: int  # symbols of the character that the last token completed


class PhraseTrack:
    """The automaton's state after every new token."""

    def __init__(self, automaton: TokenAutomaton, start: PhraseState, last: int) -> None:
        self.automaton, self.last = automaton, last
        self.tokens: list[int] = []  # new tokens read
        self._steps = [_Step(start, 0, -1 if start.pending else 0, 0)]  # after n tokens

    @property
    def state(self) -> PhraseState:
        return self._steps[-1].state

    @property
    def left(self) -> int:
        """Tokens that may follow the next one."""
        return max(0, self.last - len(self.tokens) - 1)

    def push(self, token: int) -> int | None:
        index, (state, emitted, begun, _) = len(self.tokens), self._steps[-1]
        move = self.automaton.read(state, token, index + 1 == self.last)
        self.tokens.append(token)
        self._steps.append(
            _Step(move.state, emitted + move.symbols, begun if move.waits else index, move.joined)
        )
        return None if move.found is None else self._owner(emitted + move.found)

    def rewind(self, length: int) -> None:
        del self.tokens[length:]
        del self._steps[length + 1 :]

    def settled(self) -> int:
        """Return the leading tokens that no phrase can take back; an open one takes all from its first."""
        length = len(self.tokens)
        while (first := self._first_open(length)) < length:
            length = first
        return length

    def _first_open(self, length: int) -> int:
        """Return the first of `length` tokens that may hold an open phrase's beginning; `length` for none."""
        phrases, (state, emitted, begun, _) = self.automaton.phrases, self._steps[length]
        symbols = phrases.depth[state.node] - phrases.symbols.whole_words
        first = length
        if symbols > 0:
            first = max(0, self._owner(emitted - symbols))
        return max(0, min(first, begun)) if state.pending else first

    def awaits_boundary(self) -> int | None:
        """Return the first token of a phrase that the end of the text would complete; None without one."""
        state, emitted, *_ = self._steps[-1]
        _, found = self.automaton.search(state.node, self.automaton.phrases.end_symbols)
        return None if found is None else max(0, self._owner(emitted + found))

    def may_be_cut(self) -> int:
        """Return the leading tokens that may stand alone: no phrase is complete at their end."""
        open_phrase = self.awaits_boundary()
        return len(self.tokens) if open_phrase is None else open_phrase

    def _owner(self, symbol: int) -> int:
        """Return the index of the token with the first byte of a symbol; -1 for one of the prompt."""
        if symbol < 0:
            return -1
        index = bisect_right(self._steps, symbol, key=lambda step: step.emitted) - 1
        step = self._steps[index]
        if index < len(self.tokens) and symbol - step.emitted < self._steps[index + 1].joined:
            return step.begun
        return min(index, len(self.tokens) - 1)


def prompt_state(automaton: PhraseAutomaton, texts: list[bytes | None]) -> PhraseState:
    """Return the state after a prompt, whose special tokens (None) cut its text."""
    node, pending = automaton.start
    for text in texts:
        if text is None:
            node, pending = automaton.start
            continue
        symbols, pending = automaton.decoded(pending, text)
        node = automaton.walk(node, symbols)
    return PhraseState(node, pending)
