"""Recent texts: what earlier requests wrote, within a bound of memory, the oldest out first.

Texts lie in *scopes*, and a search sees the texts of one scope alone: each has an index of its own. A server
gives each API key its own scope, because how soon an accepted draft is there tells that its text was known.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from foredraft.drafters.text_index import Matches, TextIndex

__all__ = ["RecentTexts", "Text"]

RUNS = (8, 3)  # tokens of the runs that have tables; one token or two say little about another text
# Memory, measured as its upper bound: of a token, whose runs each have an entry of a dictionary with two
# numbers; of a text; and of a scope, whose tables start with some room.
BYTES_PER_TOKEN, BYTES_PER_TEXT, BYTES_PER_SCOPE = 512, 256, 4096
FEWEST = 4  # tokens: in a shorter text no run of a table is followed by a token


class Text(NamedTuple):
    """A text of a request."""

    scope: bytes
    tokens: list[int]


class RecentTexts:
    """The latest texts of all scopes. One thread searches and adds at a time; another may read `all`.

    Args:
        most_bytes: Memory of all texts at most; 0 keeps none.

    Attributes:
        bytes: Memory of all texts now.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._indices: dict[bytes, TextIndex] = {}
        self._order: deque[tuple[bytes, int]] = deque()  # scope and tokens of each text, the oldest first
        self._texts: Counter[bytes] = Counter()  # scope -> its texts
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many texts there are."""
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

    def all(self) -> list[Text]:
        """Return all texts, the oldest first. Any thread may call this."""
        with self._lock:
            counts: dict[bytes, list[int]] = {}
            for scope, count in self._order:
                counts.setdefault(scope, []).append(count)
            texts = {scope: iter(self._indices[scope].oldest(own)) for scope, own in counts.items()}
            return [Text(scope, next(texts[scope])) for scope, _ in self._order]


def _bytes(tokens: int) -> int:
    """Return the memory of a text of so many tokens, with the boundary before it."""
    return BYTES_PER_TEXT + BYTES_PER_TOKEN * (tokens + 1)
