"""Which values an option takes: a class for each kind of value, with the remedy for one that does not fit."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from foredraft.errors import NO_VALUE, Text, did_you_mean, invalid_at

MAX_WHOLE = 2**31 - 1  # of counts of tokens: what 32 bits hold


class Unfit(Exception):
    """A value does not fit its option.

    Args:
        remedy: What to do instead.
        problem: What is wrong, where the value itself does not show it; the error then leaves the value out.
        value: What the error shows as the value; by default the value as it was given.
    """

    def __init__(self, remedy: Text, problem: str = "", value: Any = NO_VALUE) -> None:
        super().__init__(remedy)
        self.remedy, self.problem, self.value = remedy, problem, value


@dataclass(frozen=True, slots=True)
class Value:
    """Any value; the base of the kinds of values.

    Args:
        what: What to give, for the remedy.
    """

    what: Text = ""

    def read(self, given: Any) -> Any:
        """Return a user's value in the form in which the option keeps it.

        Raises:
            Unfit: The option does not take it.
        """
        if not self.fits(given):
            raise Unfit(self.remedy(given))
        return given

    def fits(self, given: Any) -> bool:
        """Return whether the option takes a value."""
        return True

    def remedy(self, given: Any) -> Text:
        """Return what to give in place of a value that does not fit."""
        return f"give {self.what}" if isinstance(self.what, str) else ("give ", *self.what)


@dataclass(frozen=True, slots=True)
class Number(Value):
    """A number within bounds.

    Args:
        what: What to give, for the remedy.
        least: The lower bound.
        most: The upper bound; by default any number that is not infinite.
        above: The lower bound itself does not fit.
    """

    least: float = 0.0
    most: float = sys.float_info.max
    above: bool = False

    def fits(self, given: Any) -> bool:
        return (
            is_number(given) and self.least <= given <= self.most and not (self.above and given == self.least)
        )


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

    def fits(self, given: Any) -> bool:
        return isinstance(given, bool)


@dataclass(frozen=True, slots=True)
class Words(Value):
    """Text that UTF-8 can encode."""

    what: Text = "text"

    def fits(self, given: Any) -> bool:
        return is_text(given)


@dataclass(frozen=True, slots=True)
class Name(Value):
    """The name of something that only the loaded model can look up."""

    def fits(self, given: Any) -> bool:
        return isinstance(given, str)


@dataclass(frozen=True, slots=True)
class Source(Value):
    """A folder, a file or a hub id."""

    def fits(self, given: Any) -> bool:
        return isinstance(given, str | Path)


@dataclass(frozen=True, slots=True)
class Sources(Value):
    """A source or several, kept as a tuple."""

    def read(self, given: Any) -> tuple[str | Path, ...]:
        several = (given,) if isinstance(given, str | Path) else given
        if not isinstance(several, tuple | list) or not all(isinstance(each, str | Path) for each in several):
            raise Unfit(self.remedy(given))
        return tuple(several)


@dataclass(frozen=True, slots=True)
class File(Value):
    """A file."""

    def fits(self, given: Any) -> bool:
        return isinstance(given, Path)


@dataclass(frozen=True, slots=True)
class Choice(Value):
    """One of several names.

    Args:
        what: What to give, for the remedy; by default the names.
        names: The names, such as the keys of a table, which are read when a value is checked.
    """

    names: Collection[str] = ()

    def fits(self, given: Any) -> bool:
        return given in tuple(self.names)  # of a tuple, because a value that is not hashable is compared too

    def remedy(self, given: Any) -> Text:
        what = self.what or f"one of {', '.join(self.names)}"
        return f"give {what}{did_you_mean(given, self.names)}"


@dataclass(frozen=True, slots=True)
class Strings(Value):
    """A string or several, kept as a tuple without repetitions.

    Args:
        what: What to give, for the remedy.
        least: How many it must be at least.
    """

    what: Text = "a string or several, none of them empty"
    least: int = 0

    def read(self, given: Any) -> tuple[str, ...]:
        several = (given,) if isinstance(given, str) else given
        fits = isinstance(several, tuple | list) and all(is_text(each) and each for each in several)
        if not fits or len(several) < self.least:
            raise Unfit(self.remedy(given))
        return tuple(dict.fromkeys(several))


@dataclass(frozen=True, slots=True)
class Ids(Value):
    """Several token ids, kept as a tuple without repetitions.

    Args:
        what: What to give, for the remedy.
        least: How many they must be at least.
    """

    what: Text = "a list of whole token ids"
    least: int = 0

    def read(self, given: Any) -> tuple[int, ...]:
        fits = isinstance(given, tuple | list) and all(is_whole(each, 0, MAX_WHOLE) for each in given)
        if not fits or len(given) < self.least:
            raise Unfit(self.remedy(given))
        return tuple(dict.fromkeys(given))


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
