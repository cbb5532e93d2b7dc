"""Which values an option takes: a class for each kind of value, with the remedy for one that does not fit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from foredraft.errors import NO_VALUE, Text, did_you_mean, invalid_at

MAX_WHOLE = 2**31 - 1  # of counts of tokens: what 32 bits hold


class Unfit(Exception):
    """A value does not fit its option; `remedy` says what to do instead."""

    def __init__(self, remedy: Text, problem: str = "", value: Any = NO_VALUE) -> None:
        super().__init__(remedy)
        self.remedy = remedy
        self.problem = problem  # where the value itself does not show it; the error then leaves the value out
        self.value = value  # what the error shows as the value; if not given, the value as it was given


@dataclass(frozen=True, slots=True)
class Value:
    """Any value; the base of the kinds of values."""

    what: Text = ""  # what to give, for the remedy
    types: ClassVar[Any] = object  # of the values that fit

    def read(self, given: Any) -> Any:
        """Return a user's value in the form in which the option keeps it; raise Unfit for a wrong one."""
        if not self.fits(given):
            raise Unfit(self.remedy(given))
        return given

    def fits(self, given: Any) -> bool:
        return isinstance(given, self.types)

    def remedy(self, given: Any) -> Text:
        """Return what to give in place of a value that does not fit."""
        return f"give {self.what}" if isinstance(self.what, str) else ("give ", *self.what)

    def several(self, given: Any, fits: Callable[[Any], object], least: int = 0) -> tuple[Any, ...]:
        """Return the values of a list or a tuple, of which each must fit."""
        if not isinstance(given, tuple | list) or len(given) < least or not all(map(fits, given)):
            raise Unfit(self.remedy(given))
        return tuple(given)


@dataclass(frozen=True, slots=True)
class Number(Value):
    """A number within bounds, by default never an infinite one."""

    least: float = 0.0
    most: float = sys.float_info.max
    above: bool = False  # the lower bound itself does not fit

    def fits(self, given: Any) -> bool:
        fits = is_number(given) and self.least <= given <= self.most
        return fits and not (self.above and given == self.least)


@dataclass(frozen=True, slots=True)
class Whole(Value):
    """A whole number within bounds."""

    least: int = 0
    most: float = MAX_WHOLE

    def fits(self, given: Any) -> bool:
        return is_whole(given, self.least, self.most)


@dataclass(frozen=True, slots=True)
class Flag(Value):
    """True or False."""

    what: Text = "True or False"
    types: ClassVar[Any] = bool


@dataclass(frozen=True, slots=True)
class Words(Value):
    """Text that UTF-8 can encode."""

    what: Text = "text"

    def fits(self, given: Any) -> bool:
        return is_text(given)


@dataclass(frozen=True, slots=True)
class Name(Value):
    """The name of something that only the loaded model can look up."""

    types: ClassVar[Any] = str


@dataclass(frozen=True, slots=True)
class Source(Value):
    """A folder, a file or a hub id."""

    types: ClassVar[Any] = str | Path


@dataclass(frozen=True, slots=True)
class Sources(Source):
    """A source or several, kept as a tuple."""

    def read(self, given: Any) -> tuple[str | Path, ...]:
        return self.several((given,) if self.fits(given) else given, self.fits)


@dataclass(frozen=True, slots=True)
class File(Value):
    """A file."""

    types: ClassVar[Any] = Path


@dataclass(frozen=True, slots=True)
class Choice(Value):
    """One of several names; without `what`, the remedy lists them."""

    names: Collection[str] = ()  # such as the keys of a table, which are read when a value is checked

    def fits(self, given: Any) -> bool:
        return given in tuple(self.names)  # of a tuple, because a value that is not hashable is compared too

    def remedy(self, given: Any) -> Text:
        what = self.what or f"one of {', '.join(self.names)}"
        return f"give {what}{did_you_mean(given, self.names)}"


@dataclass(frozen=True, slots=True)
class Strings(Value):
    """A string or several, kept as a tuple without repetitions."""

    what: Text = "a string or several, none of them empty"
    least: int = 0  # how many

    def read(self, given: Any) -> tuple[str, ...]:
        several = (given,) if isinstance(given, str) else given
        return tuple(dict.fromkeys(self.several(several, lambda each: is_text(each) and each, self.least)))


@dataclass(frozen=True, slots=True)
class Ids(Value):
    """Several token ids, kept as a tuple without repetitions."""

    what: Text = "a list of whole token ids"
    least: int = 0  # how many

    def read(self, given: Any) -> tuple[int, ...]:
        return tuple(
            dict.fromkeys(self.several(given, lambda each: is_whole(each, 0, MAX_WHOLE), self.least))
        )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a user's value is a number that a float can hold; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def is_whole(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    """Return whether a user's value is a whole number within bounds; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_text(value: object) -> bool:
    """Return whether a user's value is text that UTF-8 can encode."""
    return isinstance(value, str) and invalid_at(value) is None
