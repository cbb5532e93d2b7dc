"""Sections of options whose declarations are the library's: its option -> the option of the command line.

A section is parsed into a mapping of the options that the user gave, by name. An option that is not given is
not in it, so that the default of the library or of the model applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict

from cyclopts import Group, Parameter

from foredraft.arguments import Declared, declared
from foredraft.arguments.values import Choice, File, Flag, Ids, Number, Sources, Strings, Whole
from foredraft.decode.params import SamplingParams
from foredraft.kinds.load_options import LoadOptions

__all__ = ["COMMON", "NONE", "Given", "Repeatable", "derived", "flag_of", "option", "section"]

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
    """Return the type of a parameter of a command: a section of options.

    Args:
        name: Its name.
        group: The panel of the help in which its options stand.
        options: The type of each option.
        common: Names of the options that `--help` shows, too.
    """
    marked = {
        each: Annotated[kind, Parameter(group=(COMMON, group))] if each in common else kind
        for each, kind in options.items()
    }
    made: Any = TypedDict
    return Annotated[made(name, marked, total=False), Parameter(name="*", group=group)]


def derived(
    *names: str, of: Mapping[str, Declared] = DECLARED, default: str | None = None, more: str = ""
) -> dict[str, Any]:
    """Return the types of options that the library declares, under their names there.

    Args:
        *names: Their names.
        of: The declarations; by default those of `load` and of a request.
        default: What the default is on the command line, where it is another one.
        more: A sentence on what holds on the command line alone.
    """
    return {name: _type(of[name], default, more) for name in names}


def option(kind: Any, help: str, **more: Any) -> Any:
    """Return the type of an option that the command line alone has, or has in another form.

    Args:
        kind: The type of its value.
        help: Its help.
        **more: Further arguments of `Parameter`.
    """
    return Annotated[kind, Parameter(help=help, **more)]


def _type(each: Declared, default: str | None, more: str) -> Any:
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
            kind, more = Repeatable, f"Repeatable. {more}".strip()
        case Ids():
            kind, more = RepeatableIds, f"Repeatable. {more}".strip()
    return option(kind, _help(each, default, more), **how)


def _help(each: Declared, default: str | None, more: str) -> str:
    """Return the help of an option: its line, what holds here alone, and the default."""
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
    """Return the flag of an option of the library, by its name."""
    return f"--{name.replace('_', '-')}"
