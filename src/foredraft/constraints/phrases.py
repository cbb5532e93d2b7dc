"""Phrases: an automaton that finds banned text however it is cut into tokens.

Aho and Corasick 1975, "Efficient string matching", over characters. A text becomes a string of *symbols*: its
characters, case-folded where case does not count. Where only whole words count, a boundary stands before and
behind every character that is no word character, at the beginning of the text and at its end, and a pattern
is a phrase between two boundaries; so "whole word" is plain matching, too, and a phrase is complete at its
boundary: the first character that is no word character, or the end of the text.

A token may end within a character. Its bytes wait in the state until the next token completes it; bytes that
turn out to be invalid read U+FFFD, and those of a character that the end of the text cuts off are no text.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from foredraft.constraints.open_characters import is_word

__all__ = ["BOUNDARY", "PhraseAutomaton", "PhraseState", "Symbols"]

BOUNDARY = "\ud800"  # a lone surrogate: no text contains it
BETWEEN = "\ud802"  # another one, between texts that become symbols in one call
ROOT = 0


class Symbols(dict[int, str]):
    """Maps characters to symbols, for `str.translate`.

    Args:
        ignore_case: Fold the case of every character that folds to a single one.
        whole_words: Put boundaries around characters that are neither letters, digits nor underscores.
    """

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
        """Return the symbols of a text."""
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


class PhraseAutomaton:
    """Finds patterns in a growing text.

    Args:
        phrases: The phrases to find, none of them empty.
        symbols: How text becomes symbols.
        endings: Strings at which a text may be cut off; under whole words a phrase in front of one counts.

    Attributes:
        depth: Node -> symbols of the longest suffix that begins a pattern.
        fallback: Node -> node of the next shorter such suffix.
        shortest: Node -> symbols of the shortest pattern that is complete; 0 where none is.
        patterns: All patterns, sorted.
    """

    def __init__(self, phrases: Seq[str], symbols: Symbols, endings: Seq[str] = ()) -> None:
        self.symbols = symbols
        patterns = {symbols.pattern(phrase) for phrase in phrases}
        if symbols.whole_words:
            patterns |= {
                pattern[:-1] + symbols.of(ending)
                for pattern in list(patterns)
                for ending in endings
                if not symbols.of(ending).startswith(BOUNDARY)
            }
        self.patterns = sorted(patterns)
        self.depth, self.shortest, self.fallback = [0], [0], [ROOT]
        self._next: list[dict[str, int]] = [{}]
        for pattern in self.patterns:
            self.shortest[self._insert(pattern)] = len(pattern)
        self._link()
        self.start = PhraseState(self.step(ROOT, BOUNDARY) if symbols.whole_words else ROOT)

    def _insert(self, pattern: str) -> int:
        node = ROOT
        for symbol in pattern:
            child = self._next[node].get(symbol)
            if child is None:
                child = self._next[node][symbol] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[node] + 1)
                self.shortest.append(0)
                self.fallback.append(ROOT)
            node = child
        return node

    def _link(self) -> None:
        """Set every node's fallback, and the shortest pattern that ends with it."""
        queue = deque([ROOT])
        while queue:
            node = queue.popleft()
            for symbol, child in self._next[node].items():
                queue.append(child)
                self.fallback[child] = ROOT if node == ROOT else self.step(self.fallback[node], symbol)
                self.shortest[child] = self.shortest[self.fallback[child]] or self.shortest[child]

    def step(self, node: int, symbol: str) -> int:
        """Return the node after one more symbol."""
        while (child := self._next[node].get(symbol)) is None:
            if node == ROOT:
                return ROOT
            node = self.fallback[node]
        return child

    def walk(self, node: int, symbols: str) -> int:
        """Return the node after several more symbols."""
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

    def first_symbols(self, pending: bytes, text: bytes) -> str:
        """Return the symbols of the first character that bytes complete."""
        characters, _ = codecs.utf_8_decode(pending + text, "replace", False)
        return self.symbols.of(characters[:1])

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
