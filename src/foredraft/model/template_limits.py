"""Bounds on the memory and the time that a chat template may take.

Contract: the sandbox (`template_sandbox.py`) tells the `Meter` of a rendering of every value that the
template makes, and of every step that it takes. What can be much larger than its operands is announced first.
The bounds lie far above what any chat takes. Every breach raises `Excess`.
"""

from __future__ import annotations

import os
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any, TypeAlias

import jinja2

__all__ = ["MAX_ITEMS", "METER", "Excess", "Meter"]

MAX_LENGTH = 2**25  # characters of one value or of the output: more than any model reads
MAX_BYTES = 2**30  # of memory that one rendering may take
LOOK = 2**26  # bytes of new values after which the memory is looked at: most of them may be gone again
MAX_SECONDS = 10.0  # of CPU time; a chat of a million tokens takes less than one
MAX_BITS = 2**16  # of a whole number; Python prints numbers of up to 4300 digits, 2**14 bits
MAX_DEPTH = 100  # levels of lists and objects within each other
ITEM = 64  # bytes of one item of a list, its object included
MAX_ITEMS = MAX_LENGTH // ITEM  # of a list that is made of a text or of another list
SMALL = 200  # characters up to which the size of a list or an object is not remembered but counted again
HELD = 2**20  # items of lists and objects whose sizes are remembered, at most
TICKS = 256  # steps of a template between two looks at the clock, if none of them is large
LARGE = 2**20  # bytes from which the clock is read at once

Container: TypeAlias = list[Any] | tuple[Any, ...] | dict[Any, Any] | set[Any] | frozenset[Any]
CONTAINERS = (list, tuple, dict, set, frozenset)
VIEWS = (KeysView, ValuesView, ItemsView)


class Excess(jinja2.TemplateError):
    """The template takes more memory or time than any chat needs."""


class Meter:
    """The memory and the time of one rendering.

    A list may hold another one many times, so printing or comparing it can take exponentially longer than it
    took to make. Therefore a value's size counts every item as often as it occurs.
    """

    def __init__(self) -> None:
        self._bytes = 0  # of values made since the last look at the memory, or in all where it cannot be seen
        self._ticks = 0
        self._start, self._resident = time.thread_time(), _resident()
        # id -> (value, characters, levels) of larger lists and objects; holding them keeps their ids theirs
        self._known: dict[int, tuple[object, int, int]] = {}
        self._held = 0  # items of them

    def tick(self, size: int = 0) -> None:
        """Count one step, which makes `size` bytes."""
        self._bytes += size
        if self._bytes > LOOK:
            self._look()
        self._check_time(size)

    def read(self, value: Any) -> Any:
        """Count one step that goes through a value without making one, and return the value."""
        self._check_time(self.weigh(value)[0])
        return value

    def _check_time(self, size: int) -> None:
        """Look at the clock now and then, and at once after a step of `size` bytes."""
        self._ticks += 1
        looks = self._ticks % TICKS == 0 or size > LARGE
        if looks and time.thread_time() - self._start > MAX_SECONDS:
            raise Excess(f"it takes more than {MAX_SECONDS:g} seconds")

    def _look(self) -> None:
        """Compare the memory that the values take with the bound."""
        taken = self._bytes
        if self._resident is not None and (now := _resident()) is not None:
            taken, self._bytes = now - self._resident, 0
        if taken > MAX_BYTES:
            raise Excess(f"it takes more than {MAX_BYTES >> 20} MiB")

    def reserve(self, length: int) -> None:
        """Check a text of `length` characters before it is made."""
        if length > MAX_LENGTH:
            raise Excess(f"it makes a value of more than {MAX_LENGTH} characters")

    def reserve_items(self, count: int) -> None:
        """Check a list of `count` items while it is made."""
        if count > MAX_ITEMS:
            raise Excess(f"it makes a list of more than {MAX_ITEMS} items")

    def reserve_product(self, left: Any, right: Any) -> None:
        """Check a text or a list that is repeated, before it is made."""
        repeated, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and not isinstance(repeated, int):
            size = len(repeated) if isinstance(repeated, str) else self.weigh(repeated)[0]
            self.reserve(times * size)

    def made(self, value: Any) -> Any:
        """Count a value that the template has made, and return it."""
        if isinstance(value, str):
            self.reserve(len(value))
            self.tick(len(value) if value.isascii() else 4 * len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise Excess(f"it makes a number of more than {MAX_BITS} bits")
        elif isinstance(value, CONTAINERS):
            self.weigh(value)
            self.tick(ITEM * len(value))
        elif isinstance(value, Iterator):
            return self.items(value)
        return value

    def items(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield values that become the items of a list, and count them."""
        for count, value in enumerate(values, 1):
            self.reserve_items(count)
            self.tick(ITEM)
            yield value

    def looped(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values that a loop goes through, and count its rounds."""
        for value in values:
            self.tick()
            yield value

    def joined(self, separator: str, texts: Iterable[str]) -> str:
        """Return the texts with a separator between them, each counted before the next is asked for."""
        listed, length = list[str](), 0
        for text in self.items(texts):
            length += len(text) + len(separator)
            self.reserve(length)
            listed.append(text)
        return separator.join(listed)

    def weigh(self, value: Any) -> tuple[int, int]:
        """Return the characters of a printed value, about, and its levels.

        Raises:
            Excess: One of them is too large.
        """
        if isinstance(value, str):
            return len(value) + 2, 0
        if isinstance(value, int):
            return value.bit_length() // 3 + 2, 0
        if isinstance(value, VIEWS):
            value = list(value)
        if not isinstance(value, CONTAINERS):
            return 32, 0  # a float, None, or an object of Jinja
        if (known := self._known.get(id(value))) is not None:
            return known[1:]
        length, levels = self._weigh_items(value)
        if length > SMALL:
            self._known[id(value)] = value, length, levels
            self._held += len(value)
            if self._held > HELD:  # values that are gone must not stay; the others are counted anew
                self._known, self._held = {}, 0
        return length, levels

    def _weigh_items(self, value: Container) -> tuple[int, int]:
        items = [*value, *value.values()] if isinstance(value, dict) else value
        length, levels = 2, 0
        for item in items:
            characters, below = self.weigh(item)
            length, levels = length + characters + 2, max(levels, below)
        self.reserve(length)
        if levels >= MAX_DEPTH:
            raise Excess(f"it nests lists and objects more than {MAX_DEPTH} deep")
        return length, levels + 1


METER: ContextVar[Meter] = ContextVar("METER")  # that of the rendering in this thread


def _resident() -> int | None:
    """Return the bytes of memory that this process holds; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
