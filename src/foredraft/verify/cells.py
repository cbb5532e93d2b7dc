"""Cells: a partition of all continuations of a few tokens, with the exact probability of each cell.

At every position, the most likely tokens given the prefix are *separate*, and all others together are the
*rest*. A cell is a full continuation of separate tokens, or a shorter prefix of them followed by the rest.
Only prefixes of separate tokens need the target's distribution, so a handful of forwards gives exact
probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Cells", "NextToken"]

Prefix = tuple[int, ...]
NextToken = Callable[[Prefix], Tensor]  # prefix -> distribution of the next token, [V] float64 on the CPU


@dataclass(frozen=True, slots=True)
class Cells:
    """A partition of all continuations of a few tokens.

    Attributes:
        probabilities: Probability of each cell, above 0; they sum to 1.
        branches: Prefix -> distribution of the next token, [V].
        separate: Prefix -> its separate next tokens, the most likely first.
        index: (prefix, whether the rest follows it) -> number of the cell.
    """

    probabilities: list[float]
    branches: dict[Prefix, Tensor]
    separate: dict[Prefix, list[int]]
    index: dict[tuple[Prefix, bool], int]

    @classmethod
    def of(cls, next_token: NextToken, widths: Sequence[int]) -> Cells:
        """Build the cells.

        Args:
            next_token: Distribution of the token after a prefix.
            widths: Number of separate tokens at each position; continuations have len(widths) tokens.
        """
        cells = cls([], {}, {}, {})
        cells._grow((), 1.0, next_token, widths)
        return cells

    def _grow(self, prefix: Prefix, probability: float, next_token: NextToken, widths: Sequence[int]) -> None:
        if len(prefix) == len(widths):
            self._add(prefix, False, probability)
            return
        distribution = self.branches[prefix] = next_token(prefix)
        order = distribution.argsort(descending=True, stable=True)
        width = widths[len(prefix)]
        rest = float(distribution[order[width:]].sum())
        if rest > 0:
            self._add(prefix, True, probability * rest)
        likely = [token for token in order[:width].tolist() if distribution[token] > 0]
        self.separate[prefix] = likely
        for token in likely:
            self._grow((*prefix, token), probability * float(distribution[token]), next_token, widths)

    def _add(self, prefix: Prefix, rest: bool, probability: float) -> None:
        self.index[prefix, rest] = len(self.probabilities)
        self.probabilities.append(probability)

    def of_sample(self, tokens: Sequence[int]) -> int | None:
        """Return the cell of a continuation, or None if the target gives it probability 0."""
        prefix: Prefix = ()
        while (distribution := self.branches.get(prefix)) is not None:
            token = tokens[len(prefix)]
            if distribution[token] == 0:
                return None
            if token not in self.separate[prefix]:
                return self.index[prefix, True]
            prefix = (*prefix, token)
        return self.index[prefix, False]

    def next_probabilities(self, prefix: Prefix) -> list[float]:
        """Return the probability of each separate token after a prefix, and last that of the rest."""
        distribution, likely = self.branches[prefix], self.separate[prefix]
        rest = distribution.clone()
        rest[likely] = 0.0
        return [*distribution[likely].tolist(), float(rest.sum())]

    def next_cell(self, prefix: Prefix, token: int) -> int:
        """Return the place of the token after a prefix in `next_probabilities`."""
        likely = self.separate[prefix]
        return likely.index(token) if token in likely else len(likely)

    @property
    def entropy(self) -> float:
        """Entropy of the cells in nats: higher where continuations spread more evenly over them."""
        return -sum(p * math.log(p) for p in self.probabilities)
