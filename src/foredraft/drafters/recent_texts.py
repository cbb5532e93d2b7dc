"""Recent texts: what earlier requests wrote, within a bound of memory; where in them an end occurred; their
file.

A table maps every run of a few tokens to its latest occurrence, and each occurrence points to the one before
it, as the hash chains of zlib do (RFC 1951, section 4). A search sees the texts of one *scope* alone: a
server gives each API key its own, because how soon an accepted draft is there tells that its text was known.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from foredraft.decode.drafter import ModelFreeDrafter
from foredraft.decode.sequence import Sequence
from foredraft.errors import ConfigError
from foredraft.files import check_place, is_no_file, write_whole
from foredraft.model.checkpoint import Checkpoint

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


RUNS = (8, 3)  # tokens of the runs that have tables; one token or two say little about another text
# Memory, measured as its upper bound: of a token, whose runs each have an entry of a dictionary with two
# numbers; of a text; and of a scope, whose tables start with some room.
BYTES_PER_TOKEN, BYTES_PER_TEXT, BYTES_PER_SCOPE = 512, 256, 4096
FEWEST = 4  # tokens: in a shorter text no run of a table is followed by a token


class RecentText(NamedTuple):
    scope: bytes
    tokens: list[int]


class RecentTexts:
    """The latest texts of all scopes. One thread searches and adds at a time; another may read `all`."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._indices: dict[bytes, TextIndex] = {}
        self._order: deque[tuple[bytes, int]] = deque()  # scope and tokens of each text, the oldest first
        self._texts: Counter[bytes] = Counter()  # scope -> its texts
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, scope: bytes, tokens: Seq[int]) -> None:
        """Add a text, and drop the oldest ones until it fits; of a text that never fits, the end is kept."""
        most = (self.most_bytes - BYTES_PER_SCOPE - _bytes(0)) // BYTES_PER_TOKEN
        kept = tokens[max(0, len(tokens) - max(0, most)) :]
        if len(kept) < FEWEST:
            return
        size = _bytes(len(kept))
        with self._lock:
            while self.bytes + size + BYTES_PER_SCOPE > self.most_bytes:
                self._drop_oldest()
            if (index := self._indices.get(scope)) is None:
                index = self._indices[scope] = TextIndex(RUNS)
                self.bytes += BYTES_PER_SCOPE
            index.begin_text()
            index.extend(kept)
            self._order.append((scope, len(kept)))
            self._texts[scope] += 1
            self.bytes += size

    def _drop_oldest(self) -> None:
        scope, count = self._order.popleft()
        self._indices[scope].drop_oldest(count)
        self.bytes -= _bytes(count)
        self._texts[scope] -= 1
        if not self._texts[scope]:
            del self._texts[scope], self._indices[scope]
            self.bytes -= BYTES_PER_SCOPE

    def search(self, scope: bytes, tail: Seq[int], most: int) -> Matches:
        """Find where the end of a text occurred in the texts of a scope; arguments as `TextIndex.search`."""
        index = self._indices.get(scope)
        return Matches(0, []) if index is None else index.search(tail, most)

    def all(self) -> list[RecentText]:
        """Return all texts, the oldest first. Any thread may call this."""
        with self._lock:
            counts: dict[bytes, list[int]] = {}
            for scope, count in self._order:
                counts.setdefault(scope, []).append(count)
            texts = {scope: iter(self._indices[scope].oldest(own)) for scope, own in counts.items()}
            return [RecentText(scope, next(texts[scope])) for scope, _ in self._order]


def _bytes(tokens: int) -> int:
    """Return the memory of a text of so many tokens, with the boundary before it."""
    return BYTES_PER_TEXT + BYTES_PER_TOKEN * (tokens + 1)


FORMAT = b"foredraft texts 1 "  # with which the first line begins
OPTION = "texts_file"  # whose value the file is
IDS = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class TextsFile:
    """Where texts are kept between runs."""

    path: Path | None  # the file; None for none
    tokenizer: str | None  # digest of the tokenizer; None without one
    size: int  # ids of the vocabulary

    @classmethod
    def of(cls, target: Checkpoint, path: Path | None) -> TextsFile:
        tokenizer = None if target.tokenizer is None else target.tokenizer.digest
        return cls(path, tokenizer, target.spec.vocab_size)

    def read(self) -> list[RecentText]:
        """Return the texts of the file, the oldest first; none where there is no file yet."""
        if self.path is None:
            return []
        check_place(self.path, OPTION)
        if not self.path.exists():
            return []
        if is_no_file(self.path):
            raise self._refused("which is no file", "give another one")
        try:
            head, _, rest = self.path.read_bytes().partition(b"\n")
        except OSError as error:
            raise self._refused(f"which cannot be read ({error.strerror})", "give another one") from error
        if not head.startswith(FORMAT):
            raise self._refused("which is no file of texts", "give another one, or remove it")
        if head != FORMAT + hashlib.sha256(rest).hexdigest().encode():
            raise self._refused("which is damaged", "remove it, or give another one")
        line, _, body = rest.partition(b"\n")
        about = json.loads(line)
        if (about["tokenizer"], about["vocabulary"]) != (self.tokenizer, self.size):
            raise self._refused("whose texts are of another tokenizer", "give another one, or remove it")
        counts = [count for _, count in about["texts"]]
        parts = np.split(np.frombuffer(body, IDS), np.cumsum(counts, dtype=np.int64))
        scopes = [bytes.fromhex(scope) for scope, _ in about["texts"]]
        return [RecentText(scope, part.tolist()) for scope, part in zip(scopes, parts, strict=False)]

    def write(self, texts: Seq[RecentText], path: Path | None = None) -> None:
        """Write texts to the file, or to another one, in place of what it has."""
        file = path or self.path
        if file is None:
            raise ConfigError("the texts have no file", remedy=f"give one here, or to load as {OPTION}")
        listed = [[text.scope.hex(), len(text.tokens)] for text in texts]
        about = {"tokenizer": self.tokenizer, "vocabulary": self.size, "texts": listed}
        body = b"".join(np.array(text.tokens, dtype=IDS).tobytes() for text in texts)
        rest = json.dumps(about).encode() + b"\n" + body
        head = FORMAT + hashlib.sha256(rest).hexdigest().encode()
        write_whole(file, head + b"\n" + rest, OPTION, private=True)

    def _refused(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError(problem, option=OPTION, value=str(self.path), remedy=remedy)
