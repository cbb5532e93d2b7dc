"""Jinja's immutable sandbox with bounds on the memory and the time of a template.

Contract: every operator, call, filter, test, list and loop goes past the `Meter` of the rendering
(`template_limits.py`), which is one of its variables. Where Jinja offers no hook, `Counting` adds one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import markupsafe
from jinja2 import nodes, pass_context, sandbox
from jinja2.runtime import Context, markup_join, str_join
from markupsafe import Markup

from foredraft.model.template_counting import MADE, Counting
from foredraft.model.template_growth import FILTERS, ITERATING, METHODS, percent_growth
from foredraft.model.template_limits import Excess, Meter

__all__ = ["METER", "Environment", "counted"]

METER = " meter"  # the name of the meter among the variables; no template can spell it
SCOPES = ("_loop_vars", "_block_vars")  # arguments that Jinja adds to calls, and takes away again
MAX_SOURCE = 2**17  # characters of a template: several times the longest; compiling so many takes seconds


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, whose templates count what they make."""

    intercepted_binops = frozenset("+ * ** %".split())

    def bound_functions(self) -> None:
        """Make all filters and tests count what they make, and check what they are given."""
        for name, filter in self.filters.items():
            self.filters[name] = _bounded(name, filter)
        self.filters[MADE] = pass_context(lambda context, value: _meter(context).made(value))
        for name, test in self.tests.items():
            self.tests[name] = _timed(test)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise Excess(f"it is longer than {MAX_SOURCE} characters")
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
            meter = _meter(context)
            is_markup = isinstance(text, Markup)
            formatter = EscapeFormatter(self, meter, text) if is_markup else Formatter(self, meter)
            result: str = type(text)(formatter.vformat(text, args, named))
            return result

        return formatted

    @pass_context
    def made(self, context: Context, value: Any) -> Any:
        """Return a list, an object or a slice that the template made."""
        return _meter(context).made(value)

    @pass_context
    def read(self, context: Context, value: Any) -> Any:
        """Return a value that a comparison or a look-up goes through, which may take long."""
        _meter(context).read(value)
        return value

    @pass_context
    def spread(self, context: Context, values: Any) -> Any:
        """Return the arguments that a star gives to a call."""
        meter = _meter(context)
        meter.reserve_characters(values)
        return _listed(meter, values)

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

    def __init__(self, environment: Environment, meter: Meter, **more: Any) -> None:
        super().__init__(environment, **more)
        self.meter = meter
        self.length = 0  # characters of the fields so far

    def format_field(self, value: Any, format_spec: str) -> Any:
        self.meter.reserve(self.length + sum(map(int, re.findall(r"\d+", format_spec))))
        text = self.meter.made(super().format_field(value, format_spec))
        self.length += len(text)
        return text


class EscapeFormatter(Formatter, markupsafe.EscapeFormatter):
    """The formatter of text that is marked as safe HTML, which escapes the fields."""

    def __init__(self, environment: Environment, meter: Meter, text: Markup) -> None:
        super().__init__(environment, meter, escape=text.escape)


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
def counted(context: Context, value: Any) -> Any:
    """Count a value that is printed, whose text was not counted yet."""
    meter = _meter(context)
    size = meter.weigh(value)[0]
    meter.print(size if not isinstance(value, str) or value.isascii() else 4 * size)
    return value


def _bounded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its result before it is made, and counts it."""
    estimate = FILTERS.get(name)

    @pass_context
    @wraps(filter)
    def bounded(context: Context, value: Any = "", /, *args: Any, **named: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        if name in ("join", "sum"):
            value = _listed(meter, value)
        if name in ITERATING:
            meter.reserve_characters(value)
        if estimate is not None:
            meter.reserve(estimate(meter, value, *args, **named))
        result = filter(*_passed(filter, context), value, *args, **named)
        return result if result is value else meter.made(result)

    return bounded


def _timed(test: Any) -> Callable[..., Any]:
    """Return a test that counts as a step: `select` makes one for each item."""

    @pass_context
    @wraps(test)
    def timed(context: Context, /, *args: Any, **named: Any) -> Any:
        _meter(context).tick()
        return test(*_passed(test, context), *args, **named)

    return timed


def _passed(function: Callable[..., Any], context: Context) -> list[Any]:
    """Return the first argument of a filter or a test that asks for the context or a part of it."""
    passed = getattr(function, "jinja_pass_arg", None)
    own = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return [] if passed is None else [own[passed.name]]


def _listed(meter: Meter, values: Iterable[Any]) -> Any:
    """Return values of unknown number as a list; those of known number as they are."""
    if hasattr(values, "__len__"):
        return values
    listed = []
    for value in values:
        meter.tick(64)
        listed.append(value)
    return listed
