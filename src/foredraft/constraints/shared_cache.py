"""Caches: a bounded one of what requests share (automata of phrases and stop strings, fitted schemas), and
those of an object's methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar
from weakref import WeakMethod

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


def caching(method: Callable[..., T], most: int | None = None) -> Callable[..., T]:
    """Return a cache of a method, for its object to hold.

    The cache does not hold the object: such a circle would live on until Python's collector comes.
    """
    own = WeakMethod(method)

    @lru_cache(most)
    def found(*given: Hashable) -> T:
        called = own()
        assert called is not None, "the object has the cache"
        return called(*given)

    return found
