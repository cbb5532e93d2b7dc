"""Bounds on the memory and the time that a chat template may take.

Contract: `template.py` asks a `Meter` before each operation whose result can be large, and tells it of every
value that the template makes. Sizes are estimated from the operands, so nothing large is ever made. The
bounds lie far above what any chat takes. Every breach raises `Excess`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any, TypeAlias

import jinja2

__all__ = ["FILTERS", "METHODS", "Excess", "Meter", "percent_growth"]

MAX_LENGTH = 2**25  # characters of one value or of the output: more than any model reads
MAX_BYTES = 2**30  # of memory that one rendering may take
LOOK = 2**26  # bytes of new values after which the memory is looked at: most of them may be gone again
MAX_SECONDS = 10.0  # of CPU time; a chat of a million tokens takes less than one
MAX_BITS = 2**16  # of a whole number; Python prints numbers of up to 4300 digits, 2**14 bits
MAX_DEPTH = 100  # levels of lists and objects within each other
ITEM = 64  # bytes of one item of a list, its object included
SMALL = 200  # characters up to which the size of a list or an object is not remembered but counted again
HELD = 2**20  # items of lists and objects whose sizes are remembered, at most
TICKS = 256  # steps of a template between two looks at the clock, if none of them is large
LARGE = 2**20  # bytes from which the clock is read at once
CODECS = {"utf-8", "utf8", "ascii", "latin-1", "utf-16", "utf-32"}  # take linear time; others do not

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
        self._printed = 0  # characters, also into variables
        self._ticks = 0
        self._start, self._resident = time.thread_time(), _resident()
        # id -> (value, characters, levels) of larger lists and objects; holding them keeps their ids theirs
        self._known: dict[int, tuple[object, int, int]] = {}
        self._held = 0  # items of them

    def tick(self, size: int = 0) -> bool:
        """Count one step, which takes `size` bytes; returns True."""
        self._bytes += size
        self._ticks += 1
        if self._bytes > LOOK:
            self._look()
        looks = self._ticks % TICKS == 0 or size > LARGE
        if looks and time.thread_time() - self._start > MAX_SECONDS:
            raise Excess(f"it takes more than {MAX_SECONDS:g} seconds")
        return True

    def print(self, size: int) -> bool:
        """Count text of `size` characters that is printed, perhaps into a variable; returns True.

        It takes no memory of its own before all of a variable's text is joined.
        """
        self._printed += size
        if self._printed > MAX_BYTES:
            raise Excess(f"it takes more than {MAX_BYTES >> 20} MiB")
        return self.tick()

    def _look(self) -> None:
        """Compare the memory that the values take with the bound."""
        taken = self._bytes
        if self._resident is not None and (now := _resident()) is not None:
            taken, self._bytes = now - self._resident, 0
        if taken > MAX_BYTES:
            raise Excess(f"it takes more than {MAX_BYTES >> 20} MiB")

    def reserve(self, length: int) -> None:
        """Check a text, or as many bytes, before it is made."""
        if length > MAX_LENGTH:
            raise Excess(f"it makes a value of more than {MAX_LENGTH} characters")

    def reserve_items(self, count: int) -> None:
        """Check a list of `count` items before it is made."""
        self.reserve(count * ITEM)

    def reserve_bits(self, count: float) -> None:
        """Check a whole number of `count` bits before it is made."""
        if count > MAX_BITS:
            raise Excess(f"it makes a number of more than {MAX_BITS} bits")

    def made(self, value: Any) -> Any:
        """Count a value that the template has made, and return it."""
        if isinstance(value, str):
            self.reserve(len(value))
            self.tick(len(value) if value.isascii() else 4 * len(value))
        elif isinstance(value, bytes):
            self.reserve(len(value))
            self.tick(len(value))
        elif isinstance(value, int):
            self.reserve_bits(value.bit_length())
        elif isinstance(value, CONTAINERS):
            self.weigh(value)
            self.tick(ITEM * len(value))
        return value

    def weigh(self, value: Any) -> tuple[int, int]:
        """Return the characters of a printed value, about, and its levels.

        Raises:
            Excess: One of them is too large.
        """
        if isinstance(value, str | bytes):
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


def _resident() -> int | None:
    """Return the bytes of memory that this process holds; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def percent_growth(meter: Meter, format: str | bytes, values: Any) -> int:
    """Return the characters of `format % values`, at most."""
    text = format if isinstance(format, str) else format.decode("latin-1")
    width = fields = 0
    for field in re.finditer(
        r"%(\((?P<key>[^()]*\))?)?[-+ #0]*(?P<width>\*|\d+)?(?:\.(?P<digits>\*|\d+))?", text
    ):
        fields += 1
        if field[1] and field["key"] is None:
            raise Excess("it formats by a key with brackets")
        for number in (field["width"], field["digits"]):
            if number == "*":
                width += sum(abs(n) for n in _listed(values) if isinstance(n, int))
            elif number:
                width += int(number)
    own = meter.weigh(values)[0]
    return len(text) + width + (own if isinstance(values, tuple) else fields * own)


def _listed(values: Any) -> Sequence[Any]:
    return values if isinstance(values, tuple) else [values]


# --- characters that the result of a method or a filter has at most, by its arguments ---------------------
# The names of their parameters are those of the methods and filters.


def _padded(meter: Meter, text: Any, width: int = 80, *rest: Any) -> int:
    return max(len(text), width)


def _tabs(meter: Meter, text: Any, tabsize: int = 8) -> int:
    return len(text) * max(1, tabsize)


def _replaced(meter: Meter, text: Any, old: Any, new: Any, count: int | None = -1) -> int:
    found = text.count(old)
    count = found if count is None or count < 0 else min(count, found)
    return len(text) + count * len(new)


def _split(meter: Meter, text: Any, sep: Any = None, maxsplit: int = -1) -> int:
    parts = len(text) // 2 if sep is None else text.count(sep)
    return len(text) + parts * ITEM


def _lines(meter: Meter, text: Any, keepends: bool = False) -> int:
    return len(text) + _count_lines(text) * ITEM


def _count_lines(text: str | bytes) -> int:
    text = text if isinstance(text, str) else text.decode("latin-1")
    return 1 + sum(text.count(end) for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")


def _joined(meter: Meter, separator: Any, items: Any) -> int:
    return meter.weigh(items)[0] + len(items) * len(separator)


def _translated(meter: Meter, text: str, table: Mapping[Any, Any]) -> int:
    longest = max((len(new) for new in table.values() if isinstance(new, str)), default=1)
    return len(text) * max(1, longest)


def _coded(meter: Meter, text: Any, encoding: str = "utf-8", errors: str = "strict") -> int:
    if encoding.lower() not in CODECS:
        raise Excess(f"it uses the encoding {encoding[:20]!r}")
    return 10 * len(text)


def _bytes_of(meter: Meter, number: int, length: int = 1, *rest: Any, **more: Any) -> int:
    return length


def _indented(meter: Meter, value: Any, width: int | str = 4, *rest: Any, **more: Any) -> int:
    text = str(value)
    return len(text) + _count_lines(text) * (len(width) if isinstance(width, str) else max(0, width))


def _joined_by(meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> int:
    return meter.weigh(value)[0] + len(value) * len(str(d))


def _json(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    *rest: Any, **more: Any,
) -> int:  # fmt: skip
    length, levels = meter.weigh(value)
    step = len(indent) if isinstance(indent, str) else max(0, indent or 0)
    return (6 if ensure_ascii else 1) * length + step * levels * length // 2


def _pretty(meter: Meter, value: Any) -> int:
    length, levels = meter.weigh(value)
    return 32 * length * (levels + 1)  # it is slow, too


def _batched(meter: Meter, value: Any, linecount: int, *rest: Any, **more: Any) -> int:
    return ITEM * linecount


def _sliced(meter: Meter, value: Any, slices: int, *rest: Any, **more: Any) -> int:
    return ITEM * slices


def _rounded(meter: Meter, value: Any, precision: int = 0, *rest: Any, **more: Any) -> int:
    meter.reserve_bits(4 * abs(precision))  # 10**precision is computed
    return 0


def _wrapped(
    meter: Meter, value: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None,
    *rest: Any, **more: Any,
) -> int:  # fmt: skip
    text = str(value)
    lines = len(text) // max(1, width) + text.count(" ") + text.count("-") + _count_lines(text)
    return len(text) + lines * len(wrapstring or "\n")


def _stripped(meter: Meter, value: Any) -> int:
    text = str(value)
    return len(text) * text.count("<") // 16  # the text is copied once for each of them


def _formatted(meter: Meter, value: Any, /, *values: Any, **named: Any) -> int:
    return percent_growth(meter, str(value), named or values)


def _replaced_in(meter: Meter, value: Any, old: Any, new: Any, count: int | None = None) -> int:
    return _replaced(meter, str(value), str(old), str(new), count)


def _padded_text(meter: Meter, value: Any, width: int = 80) -> int:
    return max(len(str(value)), width)


def _summed(meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> int:
    if isinstance(start, int | float):
        return 0
    return (len(value) + 1) * (meter.weigh(value)[0] + meter.weigh(start)[0])  # one copy for each item


Estimate: TypeAlias = Callable[..., int]
METHODS: dict[str, Estimate] = {  # of str, bytes and int
    "center": _padded, "decode": _coded, "encode": _coded, "expandtabs": _tabs, "join": _joined,
    "ljust": _padded, "replace": _replaced, "rjust": _padded, "rsplit": _split, "split": _split,
    "splitlines": _lines, "to_bytes": _bytes_of, "translate": _translated, "zfill": _padded,
}  # fmt: skip
FILTERS: dict[str, Estimate] = {
    "batch": _batched, "center": _padded_text, "format": _formatted, "indent": _indented, "join": _joined_by,
    "pprint": _pretty, "replace": _replaced_in, "round": _rounded, "slice": _sliced, "striptags": _stripped,
    "sum": _summed, "tojson": _json, "wordwrap": _wrapped,
}  # fmt: skip
