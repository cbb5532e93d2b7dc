"""Cells: a partition of all continuations of a few tokens, with the exact probability of each cell.

At every position, the most likely tokens given the prefix are *separate*, and all others together are the
*rest*. A cell is a full continuation of separate tokens, or a shorter prefix of them followed by the rest.
Only prefixes of separate tokens need the target's distribution, so a handful of forwards gives exact
probabilities. Of a distribution only the separate tokens' probabilities are kept, and which tokens are
impossible: with the vocabularies of today, the distributions of all prompts would take gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Branch", "Cells", "NextToken", "most_cells"]

Prefix = tuple[int, ...]
NextToken = Callable[[Prefix], Tensor]  # prefix -> distribution of the next token, [V] float64 on the CPU


@dataclass(frozen=True, slots=True)
class Branch:
    """What is kept of the distribution of the token after a prefix.

    Attributes:
        separate: The separate tokens, the most likely first, and their probabilities.
        rest: Probability of all others together.
        possible: [V] bool, tokens of a probability above 0; None where all are.
    """

    separate: dict[int, float]
    rest: float
    possible: Tensor | None

    @classmethod
    def of(cls, distribution: Tensor, width: int) -> Branch:
        """Return the branch with `width` separate tokens, or fewer where fewer are possible."""
        # Of equally likely tokens, the smallest ids are separate, whatever order `topk` gives them.
        least = distribution.topk(min(width, len(distribution))).values[-1]
        likely = (distribution >= least.clamp_min(torch.finfo(distribution.dtype).tiny)).nonzero()[:, 0]
        order = distribution[likely].argsort(descending=True, stable=True)[:width]
        separate = {int(token): float(distribution[token]) for token in likely[order]}
        others = distribution.clone()
        others[list(separate)] = 0.0
        possible = distribution > 0
        return cls(separate, float(others.sum()), None if possible.all() else possible)

    def allows(self, token: int) -> bool:
        return self.possible is None or bool(self.possible[token])


def most_cells(widths: Sequence[int]) -> int:
    """Return the number of cells, where no token is impossible.

    Examples:
        >>> most_cells((2, 1, 1, 1))
        9
    """
    prefixes = [math.prod(widths[:length]) for length in range(len(widths) + 1)]
    return sum(prefixes)  # the rest after each shorter prefix, and each full continuation


@dataclass(frozen=True, slots=True)
class Cells:
    """A partition of all continuations of a few tokens.

    Attributes:
        probabilities: Probability of each cell, above 0; they sum to 1.
        branches: Prefix -> what is kept of the distribution of the next token.
        index: (prefix, whether the rest follows it) -> number of the cell.
    """

    probabilities: list[float]
    branches: dict[Prefix, Branch]
    index: dict[tuple[Prefix, bool], int]

    @classmethod
    def of(cls, next_token: NextToken, widths: Sequence[int]) -> Cells:
        """Build the cells.

        Args:
            next_token: Distribution of the token after a prefix.
            widths: Number of separate tokens at each position; continuations have len(widths) tokens.
        """
        cells = cls([], {}, {})
        cells._grow((), 1.0, next_token, widths)
        return cells

    def _grow(self, prefix: Prefix, probability: float, next_token: NextToken, widths: Sequence[int]) -> None:
        if len(prefix) == len(widths):
            self._add(prefix, False, probability)
            return
        branch = self.branches[prefix] = Branch.of(next_token(prefix), widths[len(prefix)])
        if branch.rest > 0:
            self._add(prefix, True, probability * branch.rest)
        for token, share in branch.separate.items():
            self._grow((*prefix, token), probability * share, next_token, widths)

    def _add(self, prefix: Prefix, rest: bool, probability: float) -> None:
        self.index[prefix, rest] = len(self.probabilities)
        self.probabilities.append(probability)

    def of_sample(self, tokens: Sequence[int]) -> int | None:
        """Return the cell of a continuation, or None if the target gives it probability 0."""
        prefix: Prefix = ()
        while (branch := self.branches.get(prefix)) is not None:
            token = tokens[len(prefix)]
            if not branch.allows(token):
                return None
            if token not in branch.separate:
                return self.index[prefix, True]
            prefix = (*prefix, token)
        return self.index[prefix, False]

    def next_probabilities(self, prefix: Prefix) -> list[float]:
        """Return the probability of each separate token after a prefix, and last that of the rest."""
        branch = self.branches[prefix]
        return [*branch.separate.values(), branch.rest]

    def next_cell(self, prefix: Prefix, token: int) -> int:
        """Return the place of the token after a prefix in `next_probabilities`."""
        likely = list(self.branches[prefix].separate)
        return likely.index(token) if token in likely else len(likely)

    @property
    def entropy(self) -> float:
        """Entropy of the cells in nats: higher where continuations spread more evenly over them."""
        return -sum(p * math.log(p) for p in self.probabilities)
