"""An option's one declaration: a field of a frozen dataclass, and its line in the docstring of the class.

The field has the type, the default and, as `metadata=option(...)`, the values that the option takes and its
names in other programs. Its line under "Args:" is the help. An option whose default is None takes None.

    @dataclass(frozen=True)
    class Options:
        '''Options of a walk.

        Args:
            pace: Steps in a second.
        '''

        pace: float = field(default=2.0, metadata=option(Number("0 or more"), elsewhere="speed"))

        def __post_init__(self) -> None:
            check_fields(self, ConfigError)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from foredraft.arguments.values import Unfit, Value
from foredraft.errors import NO_VALUE, ForedraftError

__all__ = ["Declared", "arguments_section", "check_fields", "declared", "option", "spelled_elsewhere"]

DEFAULT = " Default: "  # begins what a line of help says of the default
KEY = "foredraft.option"  # of the metadata of a field
SECTION = re.compile(r"^Args:\n(?P<lines>(?:    .*\n?|\n(?=    ))*)", re.M)
LINE = re.compile(r"^    (?P<name>\w+): (?P<help>.*(?:\n        .*)*)", re.M)


@dataclass(frozen=True, slots=True)
class Declared:
    """One option, as it is declared.

    Attributes:
        name: Its name.
        default: Its default.
        value: Which values it takes.
        help: Its line of help, with names of options in backticks and words to give in double quotes.
        elsewhere: Its names in other programs; a short name of a command line begins with a dash.
    """

    name: str
    default: Any
    value: Value
    help: str
    elsewhere: tuple[str, ...]

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
        """Return a user's value in the form in which the option keeps it.

        Raises:
            Unfit: The option does not take it.
        """
        return None if given is None and self.default is None else self.value.read(given)


def option(value: Value, *, elsewhere: str = "") -> Mapping[str, Any]:
    """Return the metadata of a field that declares an option.

    Args:
        value: Which values it takes; None, too, where the default is None.
        elsewhere: Its names in other programs, separated by spaces.
    """
    return {KEY: (value, tuple(elsewhere.split()))}


@cache
def declared(of: Any) -> Mapping[str, Declared]:
    """Return the options that a dataclass declares, by name."""
    lines = LINE.finditer(arguments_section(of))
    helps = {line["name"]: " ".join(line["help"].split()) for line in lines}
    return MappingProxyType(
        {
            each.name: Declared(each.name, each.default, value, helps.get(each.name, ""), elsewhere)
            for each in fields(of)
            for value, elsewhere in [each.metadata[KEY]]
        }
    )


def arguments_section(of: object) -> str:
    """Return the section "Args:" of a docstring; "" where Python has left docstrings out (-OO)."""
    found = SECTION.search(inspect.getdoc(of) or "")
    return "" if found is None else found[0].rstrip() + "\n"


def check_fields(options: Any, error: type[ForedraftError]) -> None:
    """Check every option of a dataclass, and keep each value in its own form.

    Args:
        options: An object of the dataclass, while it is made.
        error: The class of the errors.

    Raises:
        ForedraftError: An option does not take its value.
    """
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
