"""Text index: texts one after the other, and where in them the end of another text occurred.

For each of a few lengths, a table maps every run of so many tokens to its latest occurrence, and each
occurrence points to the one before it, as the hash chains of LZ77 compressors do (zlib, RFC 1951, section 4).
A search follows the chain of the longest run that it finds, back over a few occurrences, and keeps those with
the most equal tokens before them. So a token takes constant time to add, to take back and to drop.

A suffix automaton would find the longest match of all, but it cannot forget its oldest text, nor take a token
back, and its states take several times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

__all__ = ["LONGEST_MATCH", "Matches", "TextIndex"]

LONGEST_MATCH = 32  # tokens: longer matches count as equally long
OCCURRENCES = 8  # that a search looks at, the latest ones: twice as many draft no better, and take longer
BOUNDARY = -1  # stands before a text, in place of a token; no token equals it
NOWHERE = -1  # in place of a place


class Matches(NamedTuple):
    """Where the end of a text occurred.

    Attributes:
        length: Equal tokens before each occurrence; 0 where there is none.
        continuations: The tokens that followed each occurrence, at least one, the latest occurrence first.
    """

    length: int
    continuations: list[list[int]]


class _Runs:
    """The runs of `n` tokens: where each occurred.

    A place is the number of tokens before it. A run is entered with the place after it, once the token there
    has arrived, so the end of a text never finds itself.

    Attributes:
        latest: Hash of a run -> the place after its latest occurrence.
        earlier: Of each place that is held: the place after the run's occurrence before; NOWHERE for none.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}
        self.earlier = array("q")

    def enter(self, tokens: array[int], held: int, first: int, text: int) -> None:
        """Enter the places from `first` to the end; other arguments as in `_keys`."""
        begin = self._begin(held + len(tokens), first, text)
        self.earlier.extend([NOWHERE] * (begin - first))
        latest, earlier = self.latest, self.earlier
        for place, key in enumerate(self._keys(tokens, held, begin, held + len(tokens)), begin):
            earlier.append(latest.get(key, NOWHERE))
            latest[key] = place

    def take_back(self, tokens: array[int], held: int, first: int, text: int) -> None:
        """Undo `enter` of the same arguments."""
        begin = self._begin(held + len(tokens), first, text)
        keys = [*self._keys(tokens, held, begin, held + len(tokens))]
        while keys:
            key, before = keys.pop(), self.earlier.pop()
            if before == NOWHERE:
                del self.latest[key]
            else:
                self.latest[key] = before
        del self.earlier[first - held :]

    def forget(self, tokens: array[int], held: int, text: int, end: int) -> None:
        """Forget the runs of the oldest text, which lies from `text` to `end`."""
        begin = self._begin(end, text, text)
        for place, key in enumerate(self._keys(tokens, held, begin, end), begin):
            if self.latest.get(key) == place:
                del self.latest[key]

    def _begin(self, end: int, first: int, text: int) -> int:
        """Return the first place from `first` on with a whole run of its text before it; `end` for none."""
        return min(max(first, text + self.n), end)

    def _keys(self, tokens: array[int], held: int, begin: int, end: int) -> list[int]:
        """Return the hash of the run before each place from `begin` to `end`.

        Args:
            tokens: All tokens that are held.
            held: The place of the first of them.
            begin: The first place.
            end: The place after the last one.
        """
        if begin >= end:
            return []
        at, count = begin - held, end - begin
        columns = [tokens[at - n : at - n + count] for n in range(self.n, 0, -1)]
        return [*map(hash, zip(*columns, strict=True))]


class TextIndex:
    """Texts, of which the last one may grow and shrink, and the oldest one may be dropped.

    Args:
        lengths: Of the runs that have tables; a match has at least as many tokens as the shortest.

    Attributes:
        end: The place after the last token: how many were added so far, boundaries included.

    Examples:
        >>> index = TextIndex((2, 1))
        >>> index.begin_text()
        >>> index.extend([5, 6, 7, 5, 6])
        >>> index.search([5, 6], 3)
        Matches(length=2, continuations=[[7, 5, 6]])
    """

    def __init__(self, lengths: Seq[int]) -> None:
        self._tokens = array("i")
        self._held = 0  # the place of the first token in memory
        self._first = 0  # the place of the first token that counts; those before it were dropped
        self._text = 0  # the place with which the last text begins
        self._tables = [_Runs(n) for n in sorted(lengths, reverse=True)]
        self.end = 0

    def begin_text(self) -> None:
        """Begin another text: no match and no continuation reaches across."""
        self._tokens.append(BOUNDARY)
        for table in self._tables:
            table.earlier.append(NOWHERE)
        self.end = self._text = self.end + 1

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens to the last text."""
        first, self.end = self.end, self.end + len(tokens)
        self._tokens.extend(tokens)
        for table in self._tables:
            table.enter(self._tokens, self._held, first, self._text)

    def rewind(self, end: int) -> None:
        """Forget the tokens of the last text from place `end` on."""
        if end < self.end:
            for table in self._tables:
                table.take_back(self._tokens, self._held, end, self._text)
            del self._tokens[end - self._held :]
            self.end = end

    def drop_oldest(self, count: int) -> None:
        """Drop the oldest text, which has `count` tokens and a boundary before them."""
        begin, self._first = self._first + 1, self._first + 1 + count
        for table in self._tables:
            table.forget(self._tokens, self._held, begin, self._first)
        dropped = self._first - self._held
        if 2 * dropped > len(self._tokens):  # so that a token is moved once on average
            del self._tokens[:dropped]
            for table in self._tables:
                del table.earlier[:dropped]
            self._held = self._first

    def oldest(self, counts: Seq[int]) -> list[list[int]]:
        """Return the oldest texts, which have so many tokens."""
        texts, begin = [], self._first - self._held
        for count in counts:
            texts.append(self._tokens[begin + 1 : begin + 1 + count].tolist())
            begin += 1 + count
        return texts

    def search(self, tail: Seq[int], most: int) -> Matches:
        """Find where the longest suffix of `tail` occurred that a search of some occurrences finds.

        Args:
            tail: The last LONGEST_MATCH tokens of a text, or all of a shorter one.
            most: Tokens of a continuation at most.
        """
        end = array("i", tail)
        for table in self._tables:
            length, places = self._longest(table, end)
            if length:
                return Matches(length, [self._continuation(place, most) for place in places])
        return Matches(0, [])

    def _longest(self, table: _Runs, tail: array[int]) -> tuple[int, list[int]]:
        """Return the most equal tokens before places of the tail's last run, and the places with so many."""
        best, places = 0, list[int]()
        place = table.latest.get(hash(tuple(tail[-table.n :])), NOWHERE)
        for _ in range(OCCURRENCES):
            if place < self._first:  # it is NOWHERE, or was dropped
                break
            length = self._equal_before(place - self._held, tail, table.n)
            if length > best:
                best, places = length, [place]
            elif length == best > 0:
                places.append(place)
            place = table.earlier[place - self._held]
        return best, places

    def _equal_before(self, at: int, tail: array[int], run: int) -> int:
        """Return how many tokens before index `at` equal the last ones of the tail; 0 if not even the run."""
        tokens, most = self._tokens, min(len(tail), at)
        if tokens[at - most : at] == tail[len(tail) - most :]:  # most often: a copy goes on
            return most if most >= run else 0
        if tokens[at - run : at] != tail[-run:]:  # two runs share a hash
            return 0
        equal = run
        while tokens[at - 1 - equal] == tail[-1 - equal]:
            equal += 1
        return equal

    def _continuation(self, place: int, most: int) -> list[int]:
        at = place - self._held
        tokens = self._tokens[at : at + most].tolist()
        return tokens[: tokens.index(BOUNDARY)] if BOUNDARY in tokens else tokens
