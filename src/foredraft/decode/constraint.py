"""Constraint: which tokens a sequence may emit next, and the masks of it along a draft.

Contract: a constraint counts the sequence's *new* tokens. Its mask applies to p and q alike, before every
other transform, so speculation stays exact under it. Along a draft it is advanced tentatively and then
rewound without a trace. It may also find out too late (banned text that an innocent token completes): then
`advance` names an earlier length, and the engine takes the tokens back, the same operation as a rejection.
Where it allows no token at all (a *dead end*) the text is rolled back or ends, never an illegal token drawn.

Any call may raise an error, `ConstraintError` where the request is to blame. `Guarded` catches it, and the
sequence ends with it, alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.model.transfers import upload

__all__ = ["Along", "Constraint", "ConstraintError", "Walks", "masks_along"]


class ConstraintError(Exception):
    """What a request asks for cannot be decided; the message names the option. It ends its sequence."""


class Constraint:
    """Base class: the state of one sequence. Lengths count new tokens.

    Attributes:
        ended_by: Why the text has to end here, for people; None while it may go on.
        failed: The error that broke it, for people, which names the option; None while it works.
        narrow: It usually forbids most tokens, so that a draft made without its masks is soon illegal.
        option: The option that asks for it.
    """

    ended_by: str | None = None
    failed: str | None = None
    option: str = "constraint"
    narrow: bool = True

    @property
    def length(self) -> int:
        """New tokens read."""
        raise NotImplementedError

    def mask(self) -> Tensor | None:
        """Return which tokens may be next, [V] bool on the CPU; None allows all, all False is a dead end.

        The caller does not write to it.
        """
        return None

    @property
    def at_dead_end(self) -> bool:
        """Whether no token at all is allowed."""
        mask = self.mask()
        return mask is not None and not bool(mask.any())

    def advance(self, token: int) -> int:
        """Read the next token; return how many new tokens may stay: fewer than all where a rollback is due.

        It does not roll back: along a draft the token is tentative, and `rewind` undoes it without a trace.
        """
        raise NotImplementedError

    def rewind(self, length: int) -> None:
        """Return to the state after the first `length` new tokens; any earlier length is valid."""
        raise NotImplementedError

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
    """A constraint along a draft of K tokens.

    Attributes:
        masks: [K + 1, V] bool; True = allowed.
        legal: The draft's first tokens that the constraint allows.
        dead_end: After `legal` tokens no token is allowed.
        after: [S] masks after each sibling, [V] bool; None where the text may not go on after it.
    """

    masks: Tensor
    legal: int
    dead_end: bool
    after: list[Tensor | None]


class _Walk:
    """A constraint, advanced tentatively along a draft."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.base = constraint.length

    def advance(self, token: int) -> bool:
        """Return False where the draft must end after the token: it is taken back, or nothing may follow."""
        expected = self.constraint.length + 1
        return self.constraint.advance(token) == expected and not self.constraint.at_dead_end

    def undo(self) -> None:
        self.constraint.rewind(self.base)


class Walks:
    """The constraints of a batch, walked along its drafts as tokens are drawn.

    Args:
        constraints: [B]; None for a row that has none or drafts nothing.
        vocabulary: Size V.
        device: Of the masks.

    Attributes:
        narrow: One of the constraints is.
    """

    def __init__(self, constraints: Seq[Constraint | None], vocabulary: int, device: torch.device) -> None:
        self._walks = [None if constraint is None else _Walk(constraint) for constraint in constraints]
        self.narrow = any(constraint is not None and constraint.narrow for constraint in constraints)
        self._everything = torch.ones(vocabulary, dtype=torch.bool, device=device)
        self._device = device

    def allowed(self) -> list[Tensor | None]:
        """Return which tokens each row may draw now, [B] of [V] bool on the CPU; None allows all."""
        return [self.mask(row) for row in range(len(self._walks))]

    def mask(self, row: int) -> Tensor | None:
        walk = self._walks[row]
        return None if walk is None else walk.constraint.mask()

    def masks(self) -> Tensor:
        """Return which tokens each row may draw now, [B, 1, V] bool."""
        found = self.allowed()
        masks = [self._everything if mask is None else upload(mask, self._device) for mask in found]
        return torch.stack(masks)[:, None]

    def advance(self, token: Tensor, alive: Tensor) -> list[bool]:
        """Read the tokens just drawn [B, 1] in the rows alive [B]; return the rows that go on, [B].

        A row whose token would be taken back, or after which no token is allowed, stops. The host waits once.
        """
        read = torch.stack([token[:, 0], alive.long()], 1).tolist()
        return [bool(is_alive) and self.goes_on(row, token) for row, (token, is_alive) in enumerate(read)]

    def goes_on(self, row: int, token: int) -> bool:
        """Read the token just drawn in a row; return whether its draft goes on."""
        walk = self._walks[row]
        return walk is None or walk.advance(token)

    def undo(self) -> None:
        """Leave every constraint as it was found."""
        for walk in self._walks:
            if walk is not None:
                walk.undo()


def masks_along(
    constraint: Constraint,
    draft: Seq[int],
    vocabulary: int,
    device: torch.device,
    siblings: Seq[tuple[int, int]] = (),
) -> Along:
    """Return the masks along a draft and after its siblings, and how far the constraint allows it.

    Past an illegal token the masks do not matter: p is 0 there, so verification ends at it. They are all
    True, as at a dead end, so that every distribution is finite. The constraint's state is left as it was.

    siblings: (drafted tokens before it, token) of each; a negative token is none.
    """
    everything = torch.ones(vocabulary, dtype=torch.bool, device=device)
    walk = _Walk(constraint)
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
                if walk.advance(sibling):
                    own = constraint.mask()
                    after[index] = everything if own is None else upload(own, device)
                constraint.rewind(walk.base + legal)
        if token is None or forbidden:
            break
        if constraint.advance(token) < walk.base + legal + 1:  # taken back: nothing after it counts
            break
        legal += 1
    walk.undo()
    masks += [everything] * (len(draft) + 1 - len(masks))
    return Along(torch.stack(masks), legal, dead_end, after)
