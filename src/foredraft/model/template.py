"""Render a chat template in Jinja's sandbox, as transformers does, with bounds on its memory and time.

Contract: a template is an untrusted program from the checkpoint. It runs in Jinja's immutable sandbox with
the settings, filters and globals that `transformers` gives it. `chat.py` passes it plain values only. `dict`
and `namespace` are replaced, because attributes of the real ones lead out of the sandbox. Every operator,
call, filter, list and loop goes past the `Meter` of the rendering (`template_limits.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cache, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, pass_context, sandbox, utils
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join, str_join

from foredraft.model.template_counting import Counting
from foredraft.model.template_limits import FILTERS, MAX_LENGTH, METHODS, Excess, Meter, percent_growth

__all__ = ["Refusal", "render", "variables_of"]

METER = " meter"  # the name of the meter among the variables; no template can spell it
SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to calls, and takes away again
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
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols], finalize=_counted
    )
    environment.filters["tojson"] = _to_json
    for name, filter in environment.filters.items():
        environment.filters[name] = _bounded(name, filter)
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": Dict(),
        "namespace": Namespace,
        "lipsum": _lipsum,
    }
    return environment


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, whose templates count what they make."""

    intercepted_binops = frozenset("+ * ** %".split())

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = Counting().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        _check_operator(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """Call an object. A template may name its arguments freely, so these parameters have underscores."""
        meter = _meter(__context)
        meter.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in METHODS:
            if name == "join" and args:
                args = (_listed(meter, args[0]), *args[1:])
            own = {key: value for key, value in named.items() if key not in SCOPES}
            meter.reserve(METHODS[name](meter, owner, *args, **own))
        return meter.made(super().call(__context, __obj, *args, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what replaces `str.format`, or None if the value is another one."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, by_mapping = value.__self__, value.__name__ == "format_map"

        @pass_context
        def formatted(context: Context, /, *args: Any, **named: Any) -> str:
            if by_mapping:
                [named], args = args, ()
            formatter = Formatter(self, _meter(context))
            result: str = type(text)(formatter.vformat(text, args, named))
            return result

        return formatted

    @pass_context
    def made(self, context: Context, value: Any) -> Any:
        """Return a list, an object or a slice that the template made."""
        return _meter(context).made(value)

    @pass_context
    def joined(self, context: Context, values: tuple[Any, ...]) -> str:
        """Return the texts of values, one after the other: the operator ~."""
        meter = _meter(context)
        meter.reserve(meter.weigh(values)[0])
        join = markup_join if context.eval_ctx.autoescape else str_join
        text: str = meter.made(join(values))
        return text

    @pass_context
    def tick(self, context: Context, size: int) -> bool:
        """Count one round of a loop, or one call of a macro, with `size` characters of fixed text."""
        return _meter(context).print(size)


class Formatter(sandbox.SandboxedFormatter):
    """The formatter of `str.format`, which checks every width before it is used."""

    def __init__(self, environment: Environment, meter: Meter) -> None:
        super().__init__(environment)
        self.meter = meter

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.meter.reserve(sum(map(int, re.findall(r"\d+", format_spec))))
        return self.meter.made(super().format_field(value, format_spec))


def _meter(context: Context) -> Meter:
    meter = context.parent[METER]
    assert isinstance(meter, Meter)
    return meter


def _check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Check the result of an operator before it is made."""
    meter.tick()
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            meter.reserve_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            meter.reserve_bits(left.bit_length() * max(0, right))
    elif operator == "%" and isinstance(left, str | bytes):
        meter.reserve(percent_growth(meter, left, right))
    elif operator == "*":
        repeated, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(repeated, str | bytes):
            meter.reserve(len(repeated) * max(0, times))
        elif isinstance(times, int) and isinstance(repeated, list | tuple):
            meter.reserve_items(len(repeated) * max(0, times))
    elif operator == "+" and isinstance(left, str | bytes) and isinstance(right, str | bytes):
        meter.reserve(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.reserve_items(len(left) + len(right))


@pass_context
def _counted(context: Context, value: Any) -> Any:
    """Count a value that is printed, whose text was not counted yet."""
    meter = _meter(context)
    size = meter.weigh(value)[0]
    meter.print(size if not isinstance(value, str) or value.isascii() else 4 * size)
    return value


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its result before it is made, and counts it."""
    passed, estimate = getattr(filter, "jinja_pass_arg", None), FILTERS.get(name)

    @pass_context
    @wraps(filter)
    def bounded(context: Context, value: Any = "", /, *args: Any, **named: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        if name in ("join", "sum"):
            value = _listed(meter, value)
        if estimate is not None:
            meter.reserve(estimate(meter, value, *args, **named))
        own = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = [] if passed is None else [own[passed.name]]
        result = filter(*given, value, *args, **named)
        return result if result is value else meter.made(result)

    return bounded


def _listed(meter: Meter, values: Iterable[Any]) -> Any:
    """Return values of unknown number as a list; those of known number as they are."""
    if hasattr(values, "__len__"):
        return values
    listed = []
    for value in values:
        meter.tick(64)
        listed.append(value)
    return listed


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
    if n * max > MAX_LIPSUM:
        raise Excess(f"it asks for more than {MAX_LIPSUM} words of filler text")
    return utils.generate_lorem_ipsum(n, html, min, max)
