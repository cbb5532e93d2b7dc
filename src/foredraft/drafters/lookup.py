"""Drafts copied from texts: prompt lookup, and predicted outputs. The index of texts in which drafters look.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding") proposes what followed the *latest* occurrence of the
longest suffix of the text that occurred before, among suffixes of a few tokens.

A table maps every run of a few tokens to its latest occurrence, and each occurrence points to the one before
it, as the hash chains of zlib do (RFC 1951, section 4).

A prediction is a text that the request expects, such as a file before an edit (the OpenAI API's "predicted
outputs"). An alignment follows the output through it. After a token that differs it assumes that one token
replaced one, until the output's last tokens are found in the text again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from foredraft.decode.drafter import ModelFreeDrafter, Peek
from foredraft.decode.sequence import Sequence
from foredraft.drafters.asset import Nothing

LONGEST_MATCH = 32  # tokens: longer matches count as equally long
OCCURRENCES = 8  # that a search looks at, the latest ones: twice as many draft no better, and take longer
BOUNDARY = -1  # stands before a text, in place of a token; no token equals it
NOWHERE = -1  # in place of a place


class Matches(NamedTuple):
    """Where the end of a text occurred."""

    length: int  # equal tokens before each occurrence; 0 where there is none
    continuations: list[list[int]]  # what followed each, at least one token, the latest first


class _Runs:
    """The runs of `n` tokens, by the places behind them: the tokens before each place; not the text's end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}  # hash of a run -> the place after its latest occurrence
        self.earlier = array("q")  # of each held place: the place after the run's occurrence before

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
        """Return the hash of the run before each place from `begin` to `end`."""
        if begin >= end:
            return []
        at, count = begin - held, end - begin
        columns = [tokens[at - n : at - n + count] for n in range(self.n, 0, -1)]
        return [*map(hash, zip(*columns, strict=True))]


class TextIndex:
    """Texts, of which the last one may grow and shrink, and the oldest one may be dropped.

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
        self.end = 0  # the place after the last token: how many were added so far, boundaries included

    def begin_text(self) -> None:
        """Begin another text: no match and no continuation reaches across."""
        self._tokens.append(BOUNDARY)
        for table in self._tables:
            table.earlier.append(NOWHERE)
        self.end = self._text = self.end + 1

    def extend(self, tokens: Seq[int]) -> None:
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
        texts, begin = [], self._first - self._held
        for count in counts:
            texts.append(self._tokens[begin + 1 : begin + 1 + count].tolist())
            begin += 1 + count
        return texts

    def search(self, tail: Seq[int], most: int, *, occurrences: int = OCCURRENCES) -> Matches:
        """Find where the longest suffix of `tail` occurred that a search of the latest occurrences finds."""
        end = array("i", tail)
        for table in self._tables:
            length, places = self._longest(table, end, occurrences)
            if length:
                return Matches(length, [self._continuation(place, most) for place in places])
        return Matches(0, [])

    def _longest(self, table: _Runs, tail: array[int], occurrences: int) -> tuple[int, list[int]]:
        """Return the most equal tokens before places of the tail's last run, and the places with so many."""
        best, places = 0, list[int]()
        place = table.latest.get(hash(tuple(tail[-table.n :])), NOWHERE)
        for _ in range(occurrences):
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


class IndexedDrafter(ModelFreeDrafter):
    """A drafter with an index of each sequence's own text."""

    def __init__(self, runs: Seq[int]) -> None:
        self.runs = runs  # tokens of the runs that have tables
        self.indices: dict[int, TextIndex] = {}  # by sequence id
        self.found: dict[int, Any] = {}  # by sequence id, what was found in its text, until that changes

    def join(self, sequence: Sequence) -> None:
        index = self.indices[sequence.id] = TextIndex(self.runs)
        index.extend(sequence.tokens)

    def rewind(self, sequence: Sequence) -> None:
        # Text only grows, or is a prefix of what it was after a ban's rollback.
        index = self.indices[sequence.id]
        self.found.pop(sequence.id, None)
        common = min(index.end, len(sequence.tokens))
        index.rewind(common)
        index.extend(sequence.tokens[common:])

    def leave(self, sequence: Sequence) -> None:
        self.indices.pop(sequence.id, None)
        self.found.pop(sequence.id, None)


def repeated(ids: Seq[int], size: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same text."""
    ngrams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


# Matching tokens before both places -> P(the next one matches), on source code: a policy begins with these.
CONFIDENCE = {1: 0.35, 2: 0.45, 3: 0.6, 5: 0.85}


def at_match(confidence: dict[int, float], length: int) -> float:
    return confidence[max(known for known in confidence if known <= length)]


class Lookup(IndexedDrafter):
    """A model-free drafter that costs no forward, over an index per sequence."""

    name = "lookup"

    def __init__(self, longest: int = 3) -> None:
        super().__init__(range(1, longest + 1))  # tokens of the suffixes that are looked up
        self.tail = max(longest, *CONFIDENCE)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._search(sequence, budget)[1][:budget] for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        length, tokens = self._search(sequence, limit)
        return Peek(min(limit, len(tokens)), at_match(CONFIDENCE, max(length, 1)))

    def _search(self, sequence: Sequence, most: int) -> tuple[int, list[int]]:
        """Return the length of the match, and `most` or more of the tokens that followed it."""
        asked, length, tokens = self.found.get(sequence.id, (-1, 0, []))
        if asked < most:
            tail = sequence.tokens[-self.tail :]
            length, continuations = self.indices[sequence.id].search(tail, most, occurrences=1)
            tokens = continuations[0] if continuations else []
            self.found[sequence.id] = most, length, tokens
        return length, tokens


ASSET = Nothing(Lookup)


LONGEST = 3  # tokens of a run that is looked up
# Tokens of the output before the place that were predicted -> P(the next is): a policy begins with these.
PREDICTED_CONFIDENCE = {0: 0.3, 1: 0.5, 3: 0.8, 8: 0.95}


class Alignment:
    """The place of an output in a prediction."""

    def __init__(self, predicted: Seq[int]) -> None:
        self.predicted = list(predicted)  # token ids
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of tokens -> where it ends, ascending
        for n in range(1, LONGEST + 1):
            for end in range(n, len(self.predicted) + 1):
                self._places.setdefault(tuple(self.predicted[end - n : end]), []).append(end)
        self._begin()

    def _begin(self) -> None:
        self.place, self._read = 0, 0
        self.matched = LONGEST  # a request that gives a prediction expects its beginning

    def follow(self, output: Seq[int]) -> None:
        """Follow the output up to its end; `output` has all its new tokens."""
        if len(output) < self._read:  # a ban took text back
            self._begin()
        for end in range(self._read, len(output)):
            if self.place < len(self.predicted) and self.predicted[self.place] == output[end]:
                self.place, self.matched = self.place + 1, self.matched + 1
            else:
                last = output[max(0, end + 1 - LONGEST) : end + 1]
                self.place, self.matched = self._found(last) or (self.place + 1, 0)
        self._read = len(output)

    def _found(self, last: Seq[int]) -> tuple[int, int] | None:
        """Return the place after the longest run of the output's last tokens, and the length of the run."""
        expected = self.place + 1
        for n in range(len(last), 0, -1):
            if places := self._places.get(tuple(last[-n:])):
                at = bisect_left(places, expected)
                return min(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - expected)), n
        return None

    def continuation(self, most: int) -> list[int]:
        """Return at most `most` tokens that the output is expected to go on with."""
        return self.predicted[self.place : self.place + most]


class PredictedOutputs(ModelFreeDrafter):
    """A model-free drafter that costs no forward, for requests that give a prediction."""

    name = "prediction"

    def __init__(self) -> None:
        self._alignments: dict[int, Alignment] = {}

    def join(self, sequence: Sequence) -> None:
        self._alignments[sequence.id] = Alignment(sequence.prediction)
        self.rewind(sequence)

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self._alignments[sequence.id].continuation(budget) for sequence, budget in requests]

    def peek(self, sequence: Sequence, limit: int) -> Peek:
        alignment = self._alignments[sequence.id]
        most = max(0, len(alignment.predicted) - alignment.place)
        return Peek(min(limit, most), at_match(PREDICTED_CONFIDENCE, alignment.matched))

    def rewind(self, sequence: Sequence) -> None:
        self._alignments[sequence.id].follow(sequence.new_ids)

    def leave(self, sequence: Sequence) -> None:
        self._alignments.pop(sequence.id, None)


PREDICTION_ASSET = Nothing(PredictedOutputs)
