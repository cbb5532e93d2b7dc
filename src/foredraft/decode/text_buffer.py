"""Text buffer: the text of one sequence's new tokens, and where a stop string ends it.

The text ends at the first token with which a stop string is complete: the earliest to be complete wins, and
of those complete at once the one that began first. What a detokeniser still holds back counts at once. Text
that may begin a stop string is held back (Aho and Corasick 1975, "Efficient string matching"). Stop strings
act behind the thinking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeVar

from foredraft.decode.constraint import answer_of
from foredraft.decode.thinking import ThinkingMarkers, ThinkingReader
from foredraft.model.tokenizer import Detokenizer

T = TypeVar("T")


class Automaton:
    """Finds patterns in a growing text, a symbol at a time (Aho and Corasick 1975).

    A node is the longest beginning of a pattern that the text ends with; node 0 is the empty one.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.depth, self.fallback = [0], [0]  # of a node: its length; the longest node that it ends with
        self.ends: dict[int, str] = {}  # the pattern that a node is as a whole
        self.ordered: list[int] = []  # all nodes but the first, each behind its fallback
        self._next: list[dict[str, int]] = [{}]
        for pattern in patterns:
            node = 0
            for symbol in pattern:
                if symbol not in self._next[node]:
                    self._next[node][symbol] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[node] + 1)
                    self.fallback.append(0)
                node = self._next[node][symbol]
            self.ends[node] = pattern
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for symbol, child in self._next[node].items():
                queue.append(child)
                self.ordered.append(child)
                self.fallback[child] = self.step(self.fallback[node], symbol) if node else 0

    def step(self, node: int, symbol: str) -> int:
        while (child := self._next[node].get(symbol)) is None:
            if not node:
                return 0
            node = self.fallback[node]
        return child


class StopAutomaton(Automaton):
    """Finds where any of several strings is complete."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        super().__init__(strings)
        self.complete: list[str | None] = [None] * len(self.depth)  # the longest string that a node ends with
        for node in self.ordered:
            self.complete[node] = self.ends.get(node, self.complete[self.fallback[node]])

    def open(self, node: int) -> int:
        """Return how many characters at the end may begin a stop string."""
        while node and not self._next[node]:  # complete, but too early to count
            node = self.fallback[node]
        return self.depth[node]


class TextBuffer:
    def __init__(
        self,
        detokenizer: Callable[[], Detokenizer],  # makes a fresh detokenizer at the sequence's beginning
        # strings that end the text, or their automaton, which sequences may share
        stops: Seq[str] | StopAutomaton = (),
        *,
        ends: Mapping[int, str] | None = None,  # tokens that are stop strings by themselves and show no text
        silent: Collection[int] = (),  # tokens that add no text, because the text ends before them
        include: bool = False,  # keep the stop string in the text
        least: int = 0,  # a stop string that is complete before so many tokens does not end the text
        thinking: ThinkingMarkers | None = None,  # how thinking is marked in it; None where there is none
        marks: Mapping[int, str] | None = None,  # special tokens whose text is shown: the markers of thinking
    ) -> None:
        self._fresh, self._ends, self._silent = detokenizer, ends or {}, frozenset(silent)
        self._include, self._least = include, least
        self._thinking, self._marks = thinking, marks or {}
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(tuple(stops))
        self._released = (0, 0)  # a token, and of its piece so many characters
        self.failed: str | None = None  # the tokenizer's error, for people; None while it works
        self._start(detokenizer())

    def _start(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._node = 0
        self._reader: ThinkingReader | None = None  # until the content begins
        if self._thinking is not None and not self._thinking.stops:
            self._reader = ThinkingReader(self._thinking)
        self.tokens: list[int] = []
        self.pieces: list[str] = []  # per token: the text that it made certain; they join to the text
        self._holds: list[int] = []  # per token: characters at the end that may begin a stop string
        self._length = 0  # characters of all pieces
        self._early = 0  # what is complete within so many characters came too early to count
        self._over = False
        self.stopped_by: str | None = None

    def push(self, tokens: list[int], *, ended: bool = False) -> int:
        """Read tokens up to the one that completes a stop string; return how many. ended: by the last one."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            shown = [] if token in self._silent else [token]
            piece = self._decoded(partial(self._detokenizer.push, shown), "")
            self.pieces.append(piece + self._marks.get(token, ""))
            if self._automaton.ordered and not (ended and count == len(tokens)):
                self._look(token)
            undecided = 0 if self._reader is None else self._reader.undecided
            self._holds.append(0 if self._over else max(self._automaton.open(self._node), undecided))
            if self._over:
                return count
        return len(tokens)

    def _look(self, token: int) -> None:
        """Look for a stop string that the token just read completes, and cut off what follows it."""
        text, held = self._content(self.pieces[-1]), self._pending()
        self._length += len(self.pieces[-1])
        if text is None:
            return
        if len(self.tokens) < self._least:
            self._early = self._length + len(held)
        elif token in self._ends:
            self._over, self.stopped_by = True, self._ends[token]
            self.pieces[-1] += held + (self.stopped_by if self._include else "")
            return
        self._node, end = self._scan(self._node, text, self._length - len(text))
        length = self._length
        if end is None:
            _, end = self._scan(self._node, held, self._length)
            self.pieces[-1] += "" if end is None else held
            length += len(held)
        if end is not None:
            self._over = True
            self.pieces = _trimmed(self.pieces, length - end)

    def _content(self, piece: str) -> str | None:
        """Return what a further piece adds to the content; None as long as that has not begun."""
        if self._reader is None:
            return piece
        self._reader.read(piece)
        begun = self._reader.content_at
        if begun is None:
            return None
        self._reader = None
        return self.text[begun:]

    def _scan(self, node: int, text: str, begin: int) -> tuple[int, int | None]:
        """Walk the automaton over text that begins at `begin`; return its node, and where the text ends."""
        for length, character in enumerate(text, start=begin + 1):
            node = self._automaton.step(node, character)
            complete = self._automaton.complete[node]
            if complete is not None and length > self._early:
                self.stopped_by = complete
                return node, length if self._include else length - len(complete)
        return node, None

    def finish(self) -> None:
        """Finish the text: held-back characters belong to it, but for an incomplete one."""
        if not self._over and self.pieces:
            self.pieces[-1] += self._pending()
            self._holds[-1] = 0
        self._over = True

    def rewind(self, count: int) -> None:
        tokens, pieces, holds = self.tokens[:count], self.pieces[:count], self._holds[:count]
        fresh = self._decoded(self._fresh, self._detokenizer)
        self._start(fresh)
        self.push(tokens)
        if self.failed is not None:  # what was decoded before
            self.pieces, self._holds = pieces, holds

    def _pending(self) -> str:
        return self._decoded(self._detokenizer.pending, "")

    def _decoded(self, decode: Callable[[], T], otherwise: T) -> T:
        return answer_of(self, "the tokenizer", decode, otherwise)

    def release(self, settled: int) -> list[tuple[int, str]]:
        """Return new final text of the first `settled` tokens, in parts, each with its token's index."""
        index, offset = self._released
        if settled <= index:
            return []
        pieces = [self.pieces[index][offset:], *self.pieces[index + 1 : settled]]
        parts = _trimmed(pieces, self._holds[settled - 1])
        at = next((i for i, part in enumerate(parts) if len(part) < len(pieces[i])), len(parts) - 1)
        self._released = index + at, len(parts[at]) + (offset if at == 0 else 0)
        return [(index + i, part) for i, part in enumerate(parts) if part]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def _trimmed(pieces: list[str], surplus: int) -> list[str]:
    """Return the pieces without the last `surplus` characters."""
    trimmed: list[str] = []
    for piece in reversed(pieces):
        kept = max(0, len(piece) - surplus)
        surplus -= len(piece) - kept
        trimmed.append(piece[:kept])
    return trimmed[::-1]
