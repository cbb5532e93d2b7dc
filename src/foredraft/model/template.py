"""Render a chat template in Jinja's immutable sandbox, set up as transformers sets it up.

Contract: a template is an untrusted program from the checkpoint. The sandbox keeps it from Python's internals
and from changing its values, which are plain ones (`chat.py`). A template that runs away is stopped, far
above what any chat takes: by the lengths of its source and its text, by the size of what `*` and `**` make,
by Jinja's own bound on `range`, and by the CPU time. The memory of its other values is not bounded.
The set-up is that of `_cached_compile_jinja_template` in transformers/utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, pass_context, sandbox, utils
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context

MAX_SOURCE = 2**17  # characters of a template: several times the longest; compiling so many takes seconds
MAX_LENGTH = 2**25  # characters of the text, or of one that `*` repeats: more than any model reads
MAX_BITS = 2**16  # of a whole number; Python prints numbers of up to 4300 digits, 2**14 bits
MAX_SECONDS = 10.0  # of CPU time; a chat of a million tokens takes less than one
# Names that no template can spell: of the variable with the CPU time at which a rendering is stopped, and of
# the filter that every loop goes through.
DEADLINE, TIMED = " deadline", " timed"


class Refusal(jinja2.TemplateError):
    """The error that a template raises through `raise_exception`."""


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template."""
    parts: list[str] = []
    length = 0
    deadline = time.thread_time() + MAX_SECONDS
    for part in _compiled(source).generate({**values, DEADLINE: deadline}):
        length += len(part)
        if length > MAX_LENGTH:
            raise SecurityError(f"its text is longer than {MAX_LENGTH} characters")
        parts.append(part)
    return "".join(parts)


@cache
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@cache
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, TIMED: _timed}
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": _now, "dict": Dictionary(), "namespace": Namespace,
    }  # fmt: skip
    return environment


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which stops a template that runs away.

    Nested loops, and macros that call themselves, can take years and write nothing. So the time is looked at
    in each round of a loop and at each call.
    """

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise SecurityError(f"it is longer than {MAX_SOURCE} characters")
        parsed = super()._parse(source, name, filename)
        for loop in parsed.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, TIMED, [], [], None, None, lineno=loop.lineno)
        return parsed

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """Call an object. A template may name its arguments freely, so these parameters have underscores."""
        _check_time(__context)
        return super().call(__context, __obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(operator, left, right)
        return super().call_binop(context, operator, left, right)


@pass_context
def _timed(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that a loop goes through, while there is time."""
    for value in values:
        _check_time(context)
        yield value


def _check_time(context: Context) -> None:
    if time.thread_time() > context[DEADLINE]:
        raise SecurityError(f"it takes more than {MAX_SECONDS:g} seconds")


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Check a product or a power before it is made: a whole number, or a text or a list that is repeated."""
    repeated, times = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(times, int):
        return
    if isinstance(repeated, str | list | tuple) and len(repeated) * times > MAX_LENGTH:
        raise SecurityError(f"it makes a value of more than {MAX_LENGTH} characters")
    if isinstance(repeated, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise SecurityError(f"it makes a number of more than {MAX_BITS} bits")


class GenerationBlock(ext.Extension):
    """The `{% generation %}` block, which marks assistant text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Dictionary:
    """`dict` in templates: attributes of the class lead out of the sandbox."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class Namespace(utils.Namespace):
    """Jinja's namespace, which refuses names that begin with an underscore: they lead out of the sandbox."""

    def __init__(*values: Any, **named: Any) -> None:  # no `self` parameter: a template may use that name
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
        raise SecurityError(f"a namespace cannot hold {name!r}; rename it")


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
    return datetime.now().strftime(format)
