"""A chat template's program: compiled as transformers compiles it, in a sandbox, its output bounded.

Contract: templates are Jinja programs of whoever made the checkpoint. They run in Jinja's immutable sandbox,
with the settings and names that `transformers` gives them, and get plain values only, which is `chat.py`'s
part. `dict` and `namespace` are stand-ins as there: the real ones have attributes that lead out of the
sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, sandbox, utils
from jinja2.parser import Parser

__all__ = ["Refusal", "names_in", "rendered"]

LONGEST = 2**25  # characters: more than any model reads


class Refusal(jinja2.TemplateError):
    """What a template raises by `raise_exception`."""


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """The template's text. Raises whatever a template may, and Refusal."""
    parts: list[str] = []
    length = 0
    for part in _compiled(source).generate(values):
        length += len(part)
        if length > LONGEST:
            raise jinja2.TemplateError(f"its text is longer than {LONGEST} characters")
        parts.append(part)
    return "".join(parts)


@cache
def names_in(source: str) -> frozenset[str]:
    """The variables that a template reads from outside. Raises jinja2.TemplateError."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


class Generation(ext.Extension):
    """`{% generation %}`, with which templates mark a model's own words for training: a plain block here."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Dict:
    """What of `dict` a template may use: to make one."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class Namespace(utils.Namespace):
    """Jinja's, without names that Python gives a meaning."""

    def __init__(*values: Any, **named: Any) -> None:  # without self, which may be one of the names
        made, *given = values
        attributes = dict(*given, **named)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(made, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}; rename it")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML cannot hold."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
