"""Sections of options whose declarations are the library's: its option -> the option of the command line.

A section is parsed into a mapping of the options that the user gave, so that for the others the default of
the library or of the model applies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict

from cyclopts import Group, Parameter

from foredraft.arguments import Declared, declared
from foredraft.arguments.values import Choice, File, Flag, Ids, Number, Sources, Strings, Whole
from foredraft.decode.params import SamplingParams
from foredraft.kinds.load_options import LoadOptions

Given: TypeAlias = Mapping[str, Any]
NONE: Final[Given] = MappingProxyType({})
# The options that most people need: all that `--help` shows. `--help-all` shows every option in its section.
COMMON = Group("Options", help="All options: --help-all.", sort_key=0)
Repeatable = Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False, show_default=False)]
RepeatableIds = Annotated[tuple[int, ...], Parameter(negative=(), consume_multiple=False, show_default=False)]
DECLARED = {
    **declared(SamplingParams),
    **declared(LoadOptions),
}  # of two of one name, `load` has the command's


def section(name: str, group: Group, options: Mapping[str, Any], common: Sequence[str] = ()) -> Any:
    """Return the type of a parameter of a command: a section of options."""
    marked = {
        each: Annotated[kind, Parameter(group=(COMMON, group))] if each in common else kind
        for each, kind in options.items()
    }
    made: Any = TypedDict
    return Annotated[made(name, marked, total=False), Parameter(name="*", group=group)]


def derived(
    *names: str, of: Mapping[str, Declared] = DECLARED, default: str | None = None, more: str = ""
) -> dict[str, Any]:
    """Return the types of options that the library declares, under their names there."""
    return {name: _type(of[name], _help(of[name], default, more)) for name in names}


def measured(of: Any, *names: str, whole: Callable[..., int] | None = None) -> dict[str, Any]:
    """Return the types of a measurement's options; their help ends in choices and default in brackets."""
    made: dict[str, Any] = {}
    for name in names or declared(of):
        each = declared(of)[name]
        choices = f"[choices: {', '.join(each.value.names)}]" if isinstance(each.value, Choice) else ""
        default = "" if each.default is None else f"[default: {each.default}]"
        made[name] = _type(each, in_flags(" ".join(filter(None, (each.help, choices, default)))))
        if whole is not None and isinstance(each.value, Whole):
            made[name] = Annotated[made[name], Parameter(converter=whole)]
    return made


def declared_in(of: Any, given: Given) -> dict[str, Any]:
    """Return those of the given options that a dataclass of the library declares."""
    return {name: given[name] for name in declared(of) if name in given}


def option(kind: Any, help: str, **more: Any) -> Any:
    """Return the type of an option that the command line alone has, or has in another form."""
    return Annotated[kind, Parameter(help=help, **more)]


def _type(each: Declared, help: str) -> Any:
    kind: Any = str
    how: dict[str, Any] = {}
    match each.value:
        case Flag():
            kind = bool
            if each.default is False:  # without a --no- form
                how["negative"] = ()
        case Whole():
            kind = int
        case Number():
            kind = float
        case Choice(names=names):
            kind, how["show_choices"] = Literal[tuple(names)], False  # the help has them
        case File():
            kind = Path
        case Strings() | Sources():
            kind = Repeatable
        case Ids():
            kind = RepeatableIds
    return option(kind, help, **how)


def _help(each: Declared, default: str | None, more: str) -> str:
    """Return the help of an option: its line, what holds here alone, and the default."""
    if isinstance(each.value, Strings | Sources | Ids):
        more = f"Repeatable. {more}".strip()
    shown = each.shown_default if default is None else default
    if (isinstance(each.value, Flag) and each.default is False) or f"{shown} is off" in each.meaning:
        shown = ""
    return in_flags(" ".join(filter(None, (each.meaning, more, shown and f"Default: {shown}."))))


def in_flags(text: str) -> str:
    """Return a line of help with options as flags, and without quotes around the words to give.

    Examples:
        >>> in_flags('Branch of `draft`; "owner/name@revision" says the same.')
        'Branch of --draft; owner/name@revision says the same.'
    """
    flags = re.sub(r"`(\w+)`", lambda found: flag_of(found[1]), text)
    return re.sub(r'"([^"]*)"', r"\1", flags)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
