"""Guards: faults of what belongs to one sequence end that sequence and harm no other.

A library may fail in a constraint, and in the tokenizer while it decodes the text (`TextBuffer`). Both keep
the error as `failed` and answer without the library from then on. The engine discards what the round decided
for the row, and ends the sequence with the error. What is no fault, such as Ctrl-C, passes through.

The round asks constraints in many places: while it chooses, drafts, verifies and commits. So `Guarded`
catches their errors in one place. A constraint that has failed forces nothing, goes no further along a draft,
and masks nothing, so that every distribution of the round stays finite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from foredraft.decode.constraint import Constraint, ConstraintError
from foredraft.errors import ForedraftError, is_fault

__all__ = ["Guarded", "answer_of", "fault_of", "guarded"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Guarded(Constraint):
    """Another constraint, until a call of it raises an error.

    Args:
        constraint: The other one.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._constraint, self._length = constraint, constraint.length
        self.narrow, self.option = constraint.narrow, constraint.option

    @property
    def length(self) -> int:
        return self._length

    def mask(self) -> Tensor | None:
        return self._ask(self._constraint.mask, None)

    @property
    def at_dead_end(self) -> bool:
        at_dead_end = self._ask(lambda: self._constraint.at_dead_end, True)
        return at_dead_end or self.failed is not None

    def advance(self, token: int) -> int:
        self._length += 1
        return self._ask(lambda: self._constraint.advance(token), self._length - 1)

    def rewind(self, length: int) -> None:
        self._length = length
        self._ask(lambda: self._constraint.rewind(length), None)

    def roll_back(self, length: int) -> None:
        self._length = length
        self._ask(lambda: self._constraint.roll_back(length), None)
        self.ended_by = self.failed or self._constraint.ended_by

    def retreat(self) -> int | None:
        kept = self._ask(self._constraint.retreat, None)
        self.ended_by = self.failed or self._constraint.ended_by
        return kept

    def settled(self) -> int:
        return self._ask(self._constraint.settled, 0)

    def may_be_cut(self) -> int:
        return self._ask(self._constraint.may_be_cut, self._length)

    def forced(self, most: int) -> list[int]:
        return self._ask(lambda: self._constraint.forced(most), [])

    def _ask(self, ask: Callable[[], T], otherwise: T) -> T:
        answer = answer_of(self, self.option, ask, otherwise)
        self.narrow = self._constraint.narrow
        self.ended_by = self.failed or self.ended_by
        return answer


class Failing(Protocol):
    """What can fail."""

    failed: str | None  # its error, for people; None while it works


def answer_of(part: Failing, name: str, ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer of a sequence's part; after an error, which it keeps, `otherwise` without asking.

    Args:
        part: The part.
        name: Its name, for errors that do not name it themselves.
        ask: Asks it.
        otherwise: The answer of a part that has failed.
    """
    if part.failed is not None:
        return otherwise
    try:
        return ask()
    except BaseException as error:  # a panic of a library in Rust is no Exception
        part.failed = fault_of(name, error)
        return otherwise


def fault_of(part: str, error: BaseException) -> str:
    """Return the message of a fault of a sequence's part; an error that is no fault is raised again.

    Args:
        part: Its name, for errors that do not name it themselves.
        error: That was caught.
    """
    if not is_fault(error):
        raise error
    if isinstance(error, ConstraintError | ForedraftError):
        return str(error)
    logger.error("%s failed; its request ends with an error", part, exc_info=error)
    return f"{part} failed: {type(error).__name__}: {error}"


def guarded(constraint: Constraint | None) -> Constraint | None:
    """Return a constraint with its errors caught; None without a constraint."""
    return constraint if constraint is None or isinstance(constraint, Guarded) else Guarded(constraint)
