"""A bounded cache of what requests share: automata of phrases and stop strings, and fitted schemas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KEPT_LISTS = 16  # of phrases, compiled; one ban of 10,000 phrases takes some 100 MB with its masks
KEPT_BYTES = 256 << 10  # of their phrases together; an automaton takes some 350 bytes a byte

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class LRUCache(Generic[K, T]):
    """Values by key; those that were not asked for the longest go first. Safe from several threads."""

    def __init__(self, most: int, size: int) -> None:
        self._most, self._size = most, size
        self._values: dict[K, tuple[T, int]] = {}
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """What all values count."""
        return sum(size for _, size in self._values.values())

    def get(self, key: K, size: int, make: Callable[[], T]) -> T:
        """Return the value of a key, made now if it is not kept; size: what it counts."""
        with self._lock:
            if key in self._values:
                self._values[key] = self._values.pop(key)  # the newest now
                return self._values[key][0]
        value = make()  # may take long
        if size <= self._size:
            with self._lock:
                self._values.pop(key, None)
                self._values[key] = value, size
                while len(self._values) > self._most or self.total > self._size:
                    del self._values[next(iter(self._values))]
        return value
