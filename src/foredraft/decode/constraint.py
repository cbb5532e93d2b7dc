"""Constraint: which tokens a sequence may emit next, the masks of it along a draft, and its faults.

A constraint counts the sequence's *new* tokens. Its mask applies to p and q alike, before every other
transform, so speculation stays exact. Where it finds out too late, `advance` names an earlier length, and the
engine takes the tokens back. A constraint or a text that fails keeps the error, answers without the library
from then on, and ends its own sequence alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foredraft.errors import ForedraftError, is_fault
from foredraft.model.memory import upload

logger = logging.getLogger(__name__)


class ConstraintError(Exception):
    """What a request asks for cannot be decided; the message names the option. It ends its sequence."""


class Constraint:
    """Base class: the state of one sequence; it keeps its tokens and allows all. Lengths count new tokens."""

    ended_by: str | None = None  # why the text has to end here, for people; None while it may go on
    failed: str | None = None  # the error that broke it, for people, naming the option; None while it works
    option: str = "constraint"  # the option that asks for it
    takes_back: bool = False  # it may take back tokens that were written
    narrow: bool = True  # it forbids most tokens, so that a draft made without its masks is soon illegal

    def __init__(self) -> None:
        self.tokens: list[int] = []  # new tokens read

    @property
    def length(self) -> int:
        return len(self.tokens)

    def mask(self) -> Tensor | None:
        """Return which tokens may be next, [V] bool on the CPU, not to be written to; None allows all."""
        return None

    @property
    def at_dead_end(self) -> bool:
        mask = self.mask()
        return mask is not None and not bool(mask.any())

    def advance(self, token: int) -> int:
        """Read the next token; return how many new tokens may stay: fewer than all where a rollback is due.

        It does not roll back: along a draft the token is tentative, and `rewind` undoes it without a trace.
        """
        self.tokens.append(token)
        return self.length

    def rewind(self, length: int) -> None:
        """Return to the state after the first `length` new tokens; any earlier length is valid."""
        del self.tokens[length:]

    def roll_back(self, length: int) -> None:
        """Carry out the rollback that `advance` or `retreat` returned: rewind, and bar the same way."""
        self.rewind(length)

    def retreat(self) -> int | None:
        """Return the length to roll back to from a dead end; None, with `ended_by` set, ends the text."""
        self.ended_by = "no token is allowed"
        return None

    def settled(self) -> int:
        """Return the number of new tokens that no later `advance` or `retreat` can ask back."""
        return self.length

    def may_be_cut(self) -> int:
        """Return how many new tokens may be left where a cancellation cuts the text off here."""
        return self.length

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that the constraint leaves no choice about; they are a free draft."""
        return []


class Along(NamedTuple):
    """A constraint along a draft of K tokens."""

    masks: Tensor  # [K + 1, V] bool; True = allowed
    legal: int  # the draft's first tokens that the constraint allows
    dead_end: bool  # after `legal` tokens no token is allowed
    after: list[Tensor | None]  # [S] of [V] bool, after each sibling; None where the text may not go on


def _goes_on(constraint: Constraint, token: int) -> bool:
    """Read a drafted token; return False where it is taken back, or nothing may follow it."""
    expected = constraint.length + 1
    return constraint.advance(token) == expected and not constraint.at_dead_end


class Walks:
    """The constraints of a batch, walked along its drafts as tokens are drawn."""

    def __init__(self, constraints: Seq[Constraint | None], vocabulary: int, device: torch.device) -> None:
        self._constraints = list(constraints)
        self._lengths = [0 if constraint is None else constraint.length for constraint in constraints]
        self.narrow = any(constraint is not None and constraint.narrow for constraint in constraints)
        self._vocabulary, self._device = vocabulary, device

    @cached_property
    def _everything(self) -> Tensor:
        """The mask [V] of a row that may draw any token; drafts by calls of a drafter need none."""
        return torch.ones(self._vocabulary, dtype=torch.bool, device=self._device)

    def allowed(self) -> list[Tensor | None]:
        """Return which tokens each row may draw now, [B] of [V] bool on the CPU; None allows all."""
        return [self.mask(row) for row in range(len(self._constraints))]

    def mask(self, row: int) -> Tensor | None:
        constraint = self._constraints[row]
        return None if constraint is None else constraint.mask()

    def masks(self) -> Tensor:
        """Return which tokens each row may draw now, [B, 1, V] bool."""
        found = self.allowed()
        masks = [self._everything if mask is None else upload(mask, self._device) for mask in found]
        return torch.stack(masks)[:, None]

    def advance(self, token: Tensor, alive: Tensor) -> list[bool]:
        """Read the tokens just drawn [B, 1] in the rows alive [B]; return which rows go on."""
        read = torch.stack([token[:, 0], alive.long()], 1).tolist()
        return [bool(is_alive) and self.goes_on(row, token) for row, (token, is_alive) in enumerate(read)]

    def goes_on(self, row: int, token: int) -> bool:
        """Read the token just drawn in a row; return whether its draft goes on."""
        constraint = self._constraints[row]
        return constraint is None or _goes_on(constraint, token)

    def undo(self) -> None:
        for constraint, length in zip(self._constraints, self._lengths, strict=True):
            if constraint is not None:
                constraint.rewind(length)


def masks_along(
    constraint: Constraint,
    draft: Seq[int],
    vocabulary: int,
    device: torch.device,
    siblings: Seq[tuple[int, int]] = (),
) -> Along:
    """Return the masks along a draft and after its siblings (drafted tokens before it, token; negative for
    none).

    Past an illegal token p is 0, and masks are all True, so that every distribution is finite.
    """
    everything = torch.ones(vocabulary, dtype=torch.bool, device=device)
    base = constraint.length
    masks: list[Tensor] = []
    after: list[Tensor | None] = [None] * len(siblings)
    legal, dead_end = 0, False
    for token in [*draft, None]:
        mask = constraint.mask()
        forbidden = mask is not None and (token is None or not bool(mask[token]))
        dead_end = forbidden and constraint.at_dead_end
        masks.append(everything if mask is None or dead_end else upload(mask, device))
        for index, (place, sibling) in enumerate(siblings):
            if place == legal and sibling >= 0 and (mask is None or bool(mask[sibling])):
                if _goes_on(constraint, sibling):
                    own = constraint.mask()
                    after[index] = everything if own is None else upload(own, device)
                constraint.rewind(base + legal)
        if token is None or forbidden:
            break
        if constraint.advance(token) < base + legal + 1:  # taken back: nothing after it counts
            break
        legal += 1
    constraint.rewind(base)
    masks += [everything] * (len(draft) + 1 - len(masks))
    return Along(torch.stack(masks), legal, dead_end, after)


T = TypeVar("T")
SIMPLER = "give a simpler one"  # what to do about a constraint that cannot be used


class Guarded(Constraint):
    """Another constraint, until a call of it raises an error."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint, self._length = constraint, constraint.length
        self.option, self.takes_back = constraint.option, constraint.takes_back

    @property
    def narrow(self) -> bool:  # type: ignore[override]
        return self._constraint.narrow

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
        self.ended_by = self.failed or self.ended_by
        return answer


def answer_of(part: Any, name: str, ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer of a sequence's part; after an error, which it keeps as `failed`, `otherwise`."""
    if part.failed is not None:
        return otherwise
    try:
        return ask()
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if not is_fault(error):
            raise
        part.failed = str(error)
        if not isinstance(error, ConstraintError | ForedraftError):
            logger.error("%s failed; its request ends with an error", name, exc_info=error)
            part.failed = f"{name} failed: {type(error).__name__}: {error}"
        return otherwise
