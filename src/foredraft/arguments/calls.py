"""Calls of the public API: functions that take the fields of a dataclass, and calls that fit no signature.

Python's own TypeError names neither the nearest known name nor a remedy, so such calls raise the package's
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from inspect import Parameter, getdoc, signature
from typing import Any, ParamSpec, TypeVar, cast

from foredraft.arguments.declaration import arguments_section
from foredraft.errors import ForedraftError, did_you_mean

__all__ = ["clear_calls", "takes_fields_of"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def takes_fields_of(record: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Return a decorator by which a function takes the fields of a dataclass as its own arguments.

    Type checkers and `help` see the dataclass's parameters, so that these are written once. The section
    "Args:" of its docstring becomes part of the function's, before "Returns:".

    Args:
        record: The dataclass.
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

    Args:
        error: The class of the errors.
        renamed: Remedies for names that users bring from elsewhere.
        keywords: The names that the function's `**options` may have; None leaves that check to the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = signature(function).parameters
        takes_any = keywords is None and any(each.kind is Parameter.VAR_KEYWORD for each in known.values())
        named = [name for name, each in known.items() if each.kind is not Parameter.VAR_KEYWORD]
        by_position = [name for name in named if known[name].kind is not Parameter.KEYWORD_ONLY]
        required = [name for name in by_position if known[name].default is Parameter.empty]

        def unknown(name: str) -> ForedraftError:
            names = [each for each in (*named, *(keywords or ())) if each != "self"]
            remedy = (renamed or {}).get(name)
            remedy = remedy or f"known options are {', '.join(names)}{did_you_mean(name, names)}"
            return error(f"unknown option {name!r} of {function.__name__}", remedy=remedy)

        @wraps(function)
        def checked(*values: P.args, **options: P.kwargs) -> R:
            if len(values) > len(by_position):
                own = [name for name in by_position if name != "self"]
                raise error(
                    f"{function.__name__} takes only {' and '.join(own)} by position",
                    remedy="give the other options by name",
                )
            missing = [name for name in required[len(values) :] if name not in options]
            for name in options:
                if name in by_position[: len(values)]:
                    raise error("is given twice", option=name, remedy="give it once")
                if name not in named and not takes_any and name not in (keywords or ()):
                    raise unknown(name)
            if missing:
                raise error(f"{function.__name__} needs {missing[0]}", remedy="give it")
            return function(*values, **options)

        return checked

    return decorate
