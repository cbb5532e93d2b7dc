"""The options of the public API: how each is declared, once, and how a call's arguments are checked.

Keyword forms, options of the command line, fields of requests to the server, hints for names of other
programs and tables of the docs are made of these declarations. Nothing here imports PyTorch. An option is a
field of a frozen dataclass, made by `declare` or with `metadata=option(...)`, and its line under "Args:",
which is the help. The field has the type, the default, the values that it takes and its names in other
programs. An option whose default is None takes None.

    @dataclass(frozen=True)
    class Options:
        '''Options of a walk.

        Args:
            pace: Steps in a second.
        '''

        pace: float = declare(2.0, Number("0 or more"), elsewhere="speed")

        def __post_init__(self) -> None:
            check_fields(self, ConfigError)

Python's own TypeError names neither the nearest known name nor a remedy, so such calls raise the package's
errors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from inspect import Parameter, getdoc, signature
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

from foredraft.arguments.values import Unfit, Value
from foredraft.errors import NO_VALUE, ForedraftError, did_you_mean

DEFAULT = " Default: "  # begins what a line of help says of the default
KEY = "foredraft.option"  # of the metadata of a field
SECTION = re.compile(r"^Args:\n(?P<lines>(?:    .*\n?|\n(?=    ))*)", re.M)
LINE = re.compile(r"^    (?P<name>\w+): (?P<help>.*(?:\n        .*)*)", re.M)


@dataclass(frozen=True, slots=True)
class Declared:
    """One option, as it is declared."""

    name: str
    default: Any
    value: Value  # which values it takes
    help: str  # names of options stand in backticks, words to give in double quotes
    elsewhere: tuple[str, ...]  # its names in other programs; short ones begin with a dash

    @property
    def meaning(self) -> str:
        """The help without what it says of the default."""
        return self.help.partition(DEFAULT)[0]

    @property
    def shown_default(self) -> str:
        """The default as the help says it, or as it is; "" where that says nothing."""
        said = self.help.partition(DEFAULT)[2]
        if said or self.default in (None, ()):
            return said.removesuffix(".")
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def read(self, given: Any) -> Any:
        """Return a user's value in the form in which the option keeps it; raise Unfit for a wrong one."""
        return None if given is None and self.default is None else self.value.read(given)


def option(value: Value, *, elsewhere: str = "") -> Mapping[str, Any]:
    """Return the metadata of a field that declares an option; spaces part the names in `elsewhere`."""
    return {KEY: (value, tuple(elsewhere.split()))}


def declare(default: Any, value: Value, *, elsewhere: str = "", hash: bool | None = None) -> Any:
    """Return the field of an option; arguments as `option`."""
    return field(default=default, hash=hash, metadata=option(value, elsewhere=elsewhere))


@cache
def declared(of: Any) -> Mapping[str, Declared]:
    """Return the options that a dataclass declares, by name."""
    found, lines = dict[str, Declared](), LINE.finditer(arguments_section(of))
    helps = {line["name"]: " ".join(line["help"].split()) for line in lines}
    for each in fields(of):
        if KEY in each.metadata:
            value, elsewhere = each.metadata[KEY]
            found[each.name] = Declared(each.name, each.default, value, helps.get(each.name, ""), elsewhere)
    return MappingProxyType(found)


def arguments_section(of: object) -> str:
    """Return the section "Args:" of a docstring; "" where Python has left docstrings out (-OO)."""
    found = SECTION.search(inspect.getdoc(of) or "")
    return "" if found is None else found[0].rstrip() + "\n"


def check_fields(options: Any, error: type[ForedraftError]) -> None:
    """Check every option of an object that is being made, and keep each value in its own form."""
    for name, each in declared(options.__class__).items():
        given = getattr(options, name)
        try:
            read = each.read(given)
        except Unfit as unfit:
            if unfit.problem:
                raise error(unfit.problem, option=name, remedy=unfit.remedy) from unfit.__cause__
            shown = given if unfit.value is NO_VALUE else unfit.value
            raise error(option=name, value=shown, remedy=unfit.remedy) from None
        if read is not given:
            object.__setattr__(options, name, read)


def spelled_elsewhere(of: Any) -> dict[str, str]:
    """Return the names of other programs for the options of a dataclass, each with the option's name here."""
    return {name: each.name for each in declared(of).values() for name in each.elsewhere}


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def takes_fields_of(record: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Return a decorator by which a function takes the fields of a dataclass as its own arguments.

    Type checkers and `help` see the dataclass's parameters, so that these are written once. The section
    "Args:" of its docstring becomes part of the function's, before "Returns:".
    """

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @wraps(function)
        def called(*values: P.args, **options: P.kwargs) -> R:
            return function(record(*values, **options))

        own = signature(function).return_annotation
        cast(Any, called).__signature__ = signature(record).replace(return_annotation=own)
        before, returns, after = (getdoc(function) or "").partition("Returns:\n")
        called.__doc__ = f"{before}{arguments_section(record)}\n{returns}{after}" if returns else before
        return called

    return decorate


def clear_calls(
    error: type[ForedraftError],
    renamed: Mapping[str, str] | None = None,
    keywords: Collection[str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of each call against the function's signature.

    `renamed` has remedies for names that users bring from elsewhere, and `keywords` the names that the
    function's `**options` may have; None leaves that check to the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function).parameters
        takes_any = keywords is None and any(each.kind is Parameter.VAR_KEYWORD for each in known.values())
        named = [name for name, each in known.items() if each.kind is not Parameter.VAR_KEYWORD]
        by_position = [name for name in named if known[name].kind is not Parameter.KEYWORD_ONLY]
        required = [name for name in by_position if known[name].default is Parameter.empty]
        names = [name for name in (*named, *(keywords or ())) if name != "self"]

        @wraps(function)
        def checked(*values: P.args, **options: P.kwargs) -> R:
            if len(values) > len(by_position):
                own = " and ".join(name for name in by_position if name != "self")
                remedy = "give the other options by name"
                raise error(f"{function.__name__} takes only {own} by position", remedy=remedy)
            for name in options:
                if name in by_position[: len(values)]:
                    raise error("is given twice", option=name, remedy="give it once")
                if not takes_any and name not in (*named, *names):
                    known_names = f"known options are {', '.join(names)}{did_you_mean(name, names)}"
                    remedy = (renamed or {}).get(name) or known_names
                    raise error(f"unknown option {name!r} of {function.__name__}", remedy=remedy)
            for name in required[len(values) :]:
                if name not in options:
                    raise error(f"{function.__name__} needs {name}", remedy="give it")
            return function(*values, **options)

        return checked

    return decorate
