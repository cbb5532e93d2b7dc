"""Sizes of what the methods and filters of a chat template make, estimated from their arguments.

Contract: an estimate is at least the number of characters of the result, or stands for the time where that
grows faster. The sandbox gives it to `Meter.reserve` before it calls the method or the filter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from foredraft.model.template_limits import CODECS, ITEM, Excess, Meter

__all__ = ["FILTERS", "ITERATING", "METHODS", "percent_growth"]

COPIED = 64  # characters that are copied in the time that one character of a value stands for


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
    meter.reserve_characters(items)
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
    meter.reserve_characters(value)
    return meter.weigh(value)[0] + len(value) * len(str(d))


def _json(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, *rest: Any, **more: Any,
) -> int:  # fmt: skip
    length, levels = meter.weigh(value)
    step = len(indent) if isinstance(indent, str) else max(0, indent or 0)
    step = step * levels + sum(map(len, separators or ()))
    return (6 if ensure_ascii else 1) * length + step * length // 2


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
    pieces = len(text) // max(1, width)
    meter.reserve(pieces * len(text) // COPIED)  # the rest of a long word is copied once for each piece
    lines = pieces + text.count(" ") + text.count("-") + _count_lines(text)
    return len(text) + lines * len(wrapstring or "\n")


def _words(meter: Meter, value: Any) -> int:
    return _split(meter, str(value))


def _linked(
    meter: Meter, value: Any, trim_url_limit: int | None = None, nofollow: bool = False,
    target: str | None = None, rel: str | None = None, extra_schemes: Sequence[str] | None = None,
) -> int:  # fmt: skip
    text = str(value)
    meter.reserve(len(text) * len(text))  # the end of a word is looked for from each of its brackets
    words = 1 + len(text) // 2
    return 64 * words + words * (len(target or "") + len(rel or ""))


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
    "sum": _summed, "title": _words, "tojson": _json, "urlize": _linked, "wordcount": _words,
    "wordwrap": _wrapped,
}  # fmt: skip
# Filters that take a text character by character.
ITERATING = frozenset(
    "batch groupby list map max min reject rejectattr select selectattr slice sort unique".split()
)
