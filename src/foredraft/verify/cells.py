"""Cells: a partition of all continuations of a few tokens, with the exact probability of each.

At every position the likeliest tokens given the prefix are told apart, and all others are the *rest*. A cell
is such a prefix ended by a rest, or a whole one. Only prefixes that are told apart need the target's law, so
the probabilities are exact with a handful of forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Cells", "Chances"]

Prefix = tuple[int, ...]
Chances = Callable[[Prefix], Tensor]  # -> law of the token after a prefix, [V] float64 on the CPU


@dataclass(frozen=True, slots=True)
class Cells:
    """chances[i]: the probability of cell i, never 0; they sum to 1.

    branches: prefix -> probabilities of the token after it. cells: (prefix, whether a rest ends it) -> i.
    """

    chances: list[float]
    branches: dict[Prefix, Tensor]
    index: dict[tuple[Prefix, bool], int]

    @classmethod
    def of(cls, after: Chances, widths: Sequence[int]) -> Cells:
        """Continuations of len(widths) tokens, of which widths[j] are told apart at position j."""
        cells = cls([], {}, {})
        cells._grow((), 1.0, after, widths)
        return cells

    def _grow(self, prefix: Prefix, chance: float, after: Chances, widths: Sequence[int]) -> None:
        if len(prefix) == len(widths):
            self._add(prefix, False, chance)
            return
        law = self.branches[prefix] = after(prefix)
        order = law.argsort(descending=True, stable=True)
        width = widths[len(prefix)]
        rest = float(law[order[width:]].sum())
        if rest > 0:
            self._add(prefix, True, chance * rest)
        for token in order[:width].tolist():
            if law[token] > 0:
                self._grow((*prefix, token), chance * float(law[token]), after, widths)

    def _add(self, prefix: Prefix, rest: bool, chance: float) -> None:
        self.index[prefix, rest] = len(self.chances)
        self.chances.append(chance)

    def of_sample(self, tokens: Sequence[int]) -> int | None:
        """The cell of a continuation; None if the law rules it out."""
        prefix: Prefix = ()
        while (law := self.branches.get(prefix)) is not None:
            token = tokens[len(prefix)]
            if law[token] == 0:
                return None
            longer = (*prefix, token)
            if longer not in self.branches and (longer, False) not in self.index:
                return self.index[prefix, True]
            prefix = longer
        return self.index[prefix, False]

    @property
    def entropy(self) -> float:
        """In nats: how evenly a continuation falls into the cells."""
        return -sum(chance * math.log(chance) for chance in self.chances)
