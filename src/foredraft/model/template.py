"""Render a chat template in Jinja's sandbox, as transformers does, with bounds on its memory and time.

Contract: a template is an untrusted program from the checkpoint. It runs in Jinja's immutable sandbox with
the settings and the functions that `transformers` gives it, and those of Jinja's own names that published
templates use (`template_sandbox.py`). `chat.py` passes it plain values only. `namespace` is replaced, because
attributes of the real one lead out of the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, utils
from jinja2.parser import Parser

from foredraft.model.template_limits import MAX_LENGTH, METER, Excess, Meter
from foredraft.model.template_sandbox import Environment

__all__ = ["Refusal", "render", "variables_of"]

MAX_TIME_FORMAT = 1000  # characters of a format of `strftime_now`: a field may become 256 times as long


class Refusal(jinja2.TemplateError):
    """The error that a template raises through `raise_exception`."""


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template.

    Args:
        source: The template.
        values: The variables that it may read.

    Raises:
        Refusal: The template calls `raise_exception`.
        jinja2.TemplateError: The template is malformed, leaves the sandbox, uses what published templates do
            without, or takes too much memory or time.
        Exception: Anything else that the expressions of the template raise.
    """
    template = _compiled(source)
    parts: list[str] = []
    length, meter = 0, Meter()
    token = METER.set(meter)
    try:
        for value in values.values():
            meter.weigh(value)
        for part in template.generate(values):
            length += len(part)
            if length > MAX_LENGTH:
                raise Excess(f"its text is longer than {MAX_LENGTH} characters")
            parts.append(part)
    finally:
        METER.reset(token)
    return "".join(parts)


@cache
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads.

    Raises:
        jinja2.TemplateError: The template is malformed, or uses what published templates do without.
    """
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": Namespace}
    return environment


class GenerationBlock(ext.Extension):
    """The `{% generation %}` block, which marks assistant text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


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


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _now(format: str) -> str:
    """Return the local time, formatted; `strftime_now` in templates."""
    if len(format) > MAX_TIME_FORMAT:
        raise Excess(f"it formats the time by more than {MAX_TIME_FORMAT} characters")
    return datetime.now().strftime(format)
