"""Constraint: what a sequence may say next, and the masks of it along a draft.

A constraint counts the sequence's *new* tokens. It masks p and q alike, before every other transform,
so speculation stays exact under it. It may also find out too late (a banned word completed by an
innocent token): then `advance` names an earlier length, and the engine takes the tokens back, the
same operation as a rejection.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from foredraft.model.device import upload

__all__ = ["Constraint", "Walks", "masks_along"]


class Constraint(Protocol):
    """State of one sequence. Lengths count new tokens, the prompt excluded."""

    @property
    def length(self) -> int:
        """New tokens read."""
        ...

    def mask(self) -> Tensor | None:
        """[V] bool, True = allowed as the next token; None = all are. At least one must be allowed."""
        ...

    def advance(self, token: int) -> int:
        """Read the next token; returns how many new tokens may stay: all, or fewer to ask for a rollback.

        It only asks: along a draft the token is tentative, and `rewind` undoes it without a trace.
        """
        ...

    def rewind(self, length: int) -> None:
        """Back to the state after the first `length` new tokens; any earlier length is valid."""
        ...

    def roll_back(self, length: int) -> None:
        """Carry out the rollback that the last `advance` asked for: `rewind`, and bar the same way."""
        ...

    def settled(self) -> int:
        """Return the number of new tokens that no later `advance` can ask back."""
        ...


class _Walk:
    """A constraint, advanced tentatively along a draft."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.base = constraint.length

    def advance(self, token: int) -> bool:
        """Return False where the token would be taken back: drafting past it is pointless."""
        expected = self.constraint.length + 1
        return self.constraint.advance(token) >= expected

    def undo(self) -> None:
        self.constraint.rewind(self.base)


class Walks:
    """The constraints of a batch, walked along its drafts as tokens are drawn.

    constraints: [B]; None for a row that has none or drafts nothing.
    """

    def __init__(self, constraints: Seq[Constraint | None], vocabulary: int, device: torch.device) -> None:
        self._walks = [None if constraint is None else _Walk(constraint) for constraint in constraints]
        self._everything = torch.ones(vocabulary, dtype=torch.bool, device=device)
        self._device = device

    def masks(self) -> Tensor:
        """Return which tokens each row may draw now, [B, 1, V] bool."""
        found = [None if walk is None else walk.constraint.mask() for walk in self._walks]
        masks = [self._everything if mask is None else upload(mask, self._device) for mask in found]
        return torch.stack(masks)[:, None]

    def advance(self, token: Tensor, alive: Tensor) -> Tensor:
        """Read the tokens just drawn [B, 1] in the rows alive [B]; return the rows that go on, [B] bool.

        A row whose token would be taken back stops.
        """
        read = torch.stack([token[:, 0], alive.long()], 1).tolist()
        on = [
            bool(a) and (walk is None or walk.advance(t))
            for walk, (t, a) in zip(self._walks, read, strict=True)
        ]
        return upload(on, alive.device)

    def undo(self) -> None:
        """Leave every constraint as it was found."""
        for walk in self._walks:
            if walk is not None:
                walk.undo()


def masks_along(
    constraint: Constraint, draft: Seq[int], vocabulary: int, device: torch.device
) -> tuple[Tensor, int]:
    """Return the masks along a draft, and how many of its tokens the constraint allows.

    Past an illegal token the masks do not matter: p is 0 there, so verification ends at it. The constraint's
    state is left as it was.

    Returns:
        [len(draft) + 1, V] bool, and a count of tokens.
    """
    everything = torch.ones(vocabulary, dtype=torch.bool, device=device)
    walk = _Walk(constraint)
    masks: list[Tensor] = []
    legal = 0
    for token in [*draft, None]:
        mask = constraint.mask()
        masks.append(everything if mask is None else upload(mask, device))
        if token is None or (mask is not None and not bool(mask[token])):
            break
        if not walk.advance(token):  # nothing after it counts
            break
        legal += 1
    walk.undo()
    masks += [everything] * (len(draft) + 1 - len(masks))
    return torch.stack(masks), legal
