"""Filters and methods of chat templates whose size or time can be far above that of their arguments.

Contract: each gives what Jinja's filter, or the method of `str`, gives. It checks the size of what it makes
before it makes it, or while.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import pass_environment, sandbox
from jinja2.environment import Environment
from jinja2.filters import do_indent, make_attrgetter
from markupsafe import soft_str

from foredraft.model.template_limits import MAX_ITEMS, METER, Excess
from foredraft.model.template_metering import refusal

__all__ = ["FILTERS", "METHODS", "Formatter"]

MAX_STRIPPED = 100  # characters that `strip` looks for: it compares each of the text's with all of them
MAX_INDENT = 100  # characters of a level of JSON
LINE = 8  # characters that the shortest lines of a text take while it is indented


class Formatter(sandbox.SandboxedFormatter):
    """The formatter of `str.format`: fields alone, since a format such as ":>9" could ask for any width."""

    length = 0  # characters of the fields so far

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec:
            raise refusal("format", format_spec[:20])
        meter = METER.get()
        text = meter.made(super().format_field(value, format_spec))
        self.length += len(text)
        meter.reserve(self.length)
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
        raise Excess(f"it indents JSON by more than {MAX_INDENT} characters")
    return METER.get().joined("", encoder.iterencode(value))


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    METER.get().reserve(len(value) * (LINE + (len(width) if isinstance(width, str) else width)))
    return do_indent(value, width, first, blank)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return METER.get().joined(str(d), map(str, value))


def _trim(value: Any, chars: str | None = None) -> str:
    return _stripped(soft_str(value).strip, chars)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _replaced(str(value).replace, str(old), str(new), -1 if count is None else count)


def _replaced(method: Any, old: str, new: str, count: int = -1) -> str:
    text: str = method.__self__
    found = text.count(old)
    METER.get().reserve(len(text) + (min(found, count) if count >= 0 else found) * (len(new) - len(old)))
    result: str = method(old, new, count)
    return result


def _stripped(method: Any, chars: str | None = None) -> str:
    if chars is not None and len(chars) > MAX_STRIPPED:
        raise Excess(f"it strips more than {MAX_STRIPPED} characters")
    text: str = method(chars)
    return text


def _joined(method: Any, items: Iterable[str]) -> str:
    return METER.get().joined(method.__self__, items)


def _split(method: Any, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    parts: list[str] = method(sep, min(maxsplit, MAX_ITEMS) if maxsplit >= 0 else MAX_ITEMS)
    METER.get().reserve_items(len(parts))
    return parts


FILTERS: dict[str, Callable[..., str]] = {
    "indent": _indent, "join": _join, "replace": _replace, "tojson": _to_json, "trim": _trim,
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {  # of str; the first argument is the bound method
    "join": _joined, "lstrip": _stripped, "replace": _replaced, "rstrip": _stripped, "split": _split,
    "strip": _stripped,
}  # fmt: skip
