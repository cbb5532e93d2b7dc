"""Jinja's immutable sandbox with the names that published chat templates use, and bounds on memory and time.

Contract: filters, tests, functions and methods that are not in the tables below are refused by name. The
tables hold what 174 published templates use, and close relatives that make nothing larger. Every operator,
call, filter, test, list and loop goes past the `Meter` of the rendering (`template_limits.py`). What can grow
beyond its operands is in `template_functions.py`. Where Jinja offers no hook, `Metering` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

from jinja2 import nodes, pass_context, sandbox, utils
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Undefined
from markupsafe import Markup

from foredraft.model.template_functions import FILTERS, METHODS, Formatter
from foredraft.model.template_limits import METER, Excess
from foredraft.model.template_metering import JOINED, LOOPED, MADE, READ, Metering, refusal

__all__ = ["Environment"]

MAX_SOURCE = 2**17  # characters of a template: several times the longest; compiling so many takes seconds
WHOLE_FILTERS = frozenset(  # that take a value as a whole
    "capitalize count d default first indent int items last length lower replace safe string tojson trim"
    " upper".split()
)
ITEM_FILTERS = frozenset(  # that go through the items of a value
    "dictsort join list map max min reject rejectattr select selectattr sort unique".split()
)
TESTS = frozenset(
    "boolean defined eq equalto false float in integer iterable mapping ne none number sequence string true"
    " undefined".split()
)
FUNCTIONS = frozenset("namespace raise_exception range strftime_now".split())
# `format` is not among these methods, because `wrap_str_format` replaces it; nor are those that search from
# the end, whose time is the product of two lengths.
METHODS_OF_STR = METHODS.keys() | set(
    "capitalize count endswith find index isalnum isalpha isdigit isspace lower removeprefix removesuffix"
    " startswith title upper".split()
)
METHODS_OF_DICT = frozenset("get items keys values".split())


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, whose templates count what they make."""

    intercepted_binops = frozenset("+ * ** %".split())

    def __init__(self, **options: Any) -> None:
        # Nothing is computed while a template is compiled, so that the meter of a rendering sees all of it.
        super().__init__(**options, optimized=False, finalize=_printed)
        for name, filter in (self.filters | FILTERS).items():
            known = name in WHOLE_FILTERS | ITEM_FILTERS
            self.filters[name] = _metered(name, filter) if known else _refused("filter", name)
        tests: dict[str, Any] = self.tests
        for name, test in tests.items():
            self.tests[name] = _read_first(test) if name in TESTS else _refused("test", name)
        for name in self.globals.keys() - FUNCTIONS:
            self.globals[name] = self.undefined(str(refusal("function", name)), exc=SecurityError)
        self.filters |= {
            MADE: lambda value: METER.get().made(value),
            READ: lambda value: METER.get().read(value),
            LOOPED: lambda values: METER.get().looped(values),
            JOINED: lambda values: METER.get().made(METER.get().joined("", map(str, values))),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise Excess(f"it is longer than {MAX_SOURCE} characters")
        parsed: nodes.Template = Metering().visit(super()._parse(source, name, filename))
        return parsed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise refusal("operator", operator)
        if operator == "*":
            meter.reserve_product(left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """Call an object. A template may name its arguments freely, so these parameters have underscores."""
        meter = METER.get()
        owner = getattr(__obj, "__self__", None)
        meter.read(owner)
        if isinstance(owner, str) and (checked := METHODS.get(__obj.__name__)) is not None:
            __obj = partial(checked, __obj)
        return meter.made(super().call(__context, __obj, *args, **named))

    def concat(self, parts: Iterable[str]) -> str:
        """Return the text that a macro or a block made."""
        meter = METER.get()
        parts = list(parts)
        meter.reserve(sum(map(len, parts)))
        text: str = meter.made("".join(parts))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        METER.get().read(argument)
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        match obj:
            case str():
                return attr in METHODS_OF_STR
            case dict():
                return attr in METHODS_OF_DICT
            case _:
                return isinstance(obj, LoopContext | utils.Namespace)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Return what a refused attribute is; its use raises the refusal."""
        if not super().is_safe_attribute(obj, attribute, None):
            return super().unsafe_undefined(obj, attribute)
        error = refusal("attribute", attribute, of=type(obj).__name__)
        return self.undefined(str(error), obj=obj, name=attribute, exc=SecurityError)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what replaces `str.format`, or None if the value is another one."""
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or isinstance(text, Markup) or value.__name__ != "format":
            return None
        return lambda *args, **named: Formatter(self).vformat(text, args, named)


@pass_context
def _printed(context: Context, value: Any) -> Any:
    """Return what is printed of a value. (Jinja would call a function without a context at compilation.)"""
    meter = METER.get()
    if isinstance(value, str):
        meter.tick()
        return value
    return meter.made(str(value))


def _refused(kind: str, name: str) -> Callable[..., Any]:
    """Return a filter or a test that raises the refusal of its name."""

    def refused(*args: Any, **named: Any) -> Any:
        raise refusal(kind, name)

    return refused


def _metered(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it goes through, and what it makes."""
    # Jinja gives some filters the context, or a part of it, before the value.
    first = int(hasattr(filter, "jinja_pass_arg"))

    @wraps(filter)
    def metered(*args: Any, **named: Any) -> Any:
        meter = METER.get()
        passed, value, rest = args[:first], args[first], args[first + 1 :]
        meter.read(value)
        if name in ITEM_FILTERS and isinstance(value, str | Iterator):
            value = meter.items(value)
        result = filter(*passed, value, *rest, **named)
        return result if result is value else meter.made(result)

    return metered


def _read_first(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that counts what it goes through: `select` makes one for each item."""

    @wraps(test)
    def read(*args: Any, **named: Any) -> Any:
        for value in args:
            METER.get().read(value)
        return test(*args, **named)

    return read
