"""Constraints that requests ask for: allowed tokens, banned text, regular expressions, schemas and grammars.

Its modules, and the library llguidance, are imported where the first request asks for a constraint.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KEPT_LISTS = 16  # of phrases, compiled; one ban of 10,000 phrases takes some 100 MB with its masks
KEPT_BYTES = 256 << 10  # of their phrases together; an automaton takes some 350 bytes a byte

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class LRUCache(Generic[K, T]):
    """Values by key; those that were not asked for the longest go first. Safe from several threads."""

    def __init__(self, most: int, size: int) -> None:
        self._most, self._size, self.total = most, size, 0
        self._values: OrderedDict[K, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, size: int, make: Callable[[], T]) -> T:
        """Return the value of a key, made now if it is not kept; size: what it counts."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()  # may take long
        if size <= self._size:
            with self._lock:
                self._drop(key)
                self._values[key] = value, size
                self.total += size
                while len(self._values) > self._most or self.total > self._size:
                    self._drop(next(iter(self._values)))
        return value

    def _drop(self, key: K) -> None:
        _, size = self._values.pop(key, (None, 0))
        self.total -= size
