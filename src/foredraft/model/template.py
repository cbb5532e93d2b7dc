"""Render a chat template in Jinja's sandbox, as transformers does, with bounds on its memory and time.

Contract: a template is an untrusted program from the checkpoint. It runs in Jinja's immutable sandbox with
the settings, filters and globals that `transformers` gives it. `chat.py` passes it plain values only. `dict`
and `namespace` are replaced, because attributes of the real ones lead out of the sandbox. The sandbox is that
of `template_sandbox.py`, which bounds memory and time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, utils
from jinja2.parser import Parser

from foredraft.model.template_limits import MAX_LENGTH, Excess, Meter
from foredraft.model.template_sandbox import METER, Environment, counted

__all__ = ["Refusal", "render", "variables_of"]

MAX_TIME_FORMAT = 1000  # characters of a format of `strftime_now`: a field may become 256 times as long
MAX_LIPSUM = 10**5  # words of the `lipsum` global


class Refusal(jinja2.TemplateError):
    """The error that a template raises through `raise_exception`."""


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template.

    Args:
        source: The template.
        values: The variables that it may read.

    Raises:
        Refusal: The template calls `raise_exception`.
        jinja2.TemplateError: The template is malformed, leaves the sandbox, or its text is too long.
        Exception: Anything else that the expressions of the template raise.
    """
    parts: list[str] = []
    length, meter = 0, Meter()
    for value in values.values():
        meter.weigh(value)
    for part in _compiled(source).generate({**values, METER: meter}):
        length += len(part)
        if length > MAX_LENGTH:
            raise Excess(f"its text is longer than {MAX_LENGTH} characters")
        parts.append(part)
    return "".join(parts)


@cache
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads.

    Raises:
        jinja2.TemplateError: The template is malformed.
    """
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols], finalize=counted
    )
    environment.filters["tojson"] = _to_json
    environment.bound_functions()
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": Dict(),
        "namespace": Namespace,
        "lipsum": _lipsum,
    }
    return environment


class Generation(ext.Extension):
    """The `{% generation %}` block, which marks assistant text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Dict:
    """The parts of `dict` that a template may use: both ways to make one."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class Namespace(utils.Namespace):
    """Jinja's namespace, which refuses names that begin with an underscore."""

    def __init__(*values: Any, **named: Any) -> None:  # no `self` parameter: a template may use that name
        made, *given = values
        attributes = dict(*given, **named)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(made, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # the real one prints the values, which may hold the namespace
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}; rename it")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _now(format: str) -> str:
    """Return the local time, formatted; `strftime_now` in templates."""
    if len(format) > MAX_TIME_FORMAT:
        raise Excess(f"it formats the time by more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(format)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Return filler text, as Jinja's own global does."""
    if not isinstance(n, int) or not isinstance(max, int) or n * max > MAX_LIPSUM:
        raise Excess(f"it asks for more than {MAX_LIPSUM} words of filler text")
    return utils.generate_lorem_ipsum(n, html, min, max)
