"""Pearson's chi-square test of counts against a known distribution, over cells of all continuations of a few
tokens.

At every position, the most likely tokens given the prefix are *separate*, and all others together are the
*rest*. A cell is a full continuation of separate tokens, or a shorter prefix of them followed by the rest, so
a handful of forwards gives exact probabilities.

The statistic X = sum (n_i - N p_i)^2 / (N p_i) over m cells has, under p, approximately the chi-square
distribution with m - 1 degrees of freedom (Pearson 1900). Under p + d it is approximately noncentral with
parameter N sum d_i^2 / p_i (Patnaik 1949, Biometrika 36; Cohen 1988, chapter 7). With the total variation
distance t = sum |d_i| / 2, the Cauchy-Schwarz inequality gives sum d_i^2 / p_i >= 4 t^2, with equality where
|d_i| = 2 t p_i: the power is at least that at 4 N t^2, which the functions below use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Prefix = tuple[int, ...]
NextToken = Callable[[Prefix], Tensor]  # prefix -> distribution of the next token, [V] float64 on the CPU


@dataclass(frozen=True, slots=True)
class Branch:
    """What is kept of the distribution of the token after a prefix."""

    separate: dict[int, float]  # the separate tokens, the most likely first, and their probabilities
    rest: float  # probability of all others together
    possible: Tensor | None  # [V] bool, tokens of a probability above 0; None where all are

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
    """A partition of all continuations of a few tokens."""

    probabilities: list[float]  # probability of each cell, above 0; they sum to 1
    branches: dict[Prefix, Branch]  # prefix -> what is kept of the distribution of the next token
    index: dict[tuple[Prefix, bool], int]  # (prefix, whether the rest follows it) -> number of the cell

    @classmethod
    def of(cls, next_token: NextToken, widths: Sequence[int]) -> Cells:
        """Build the cells."""
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
            if branch.possible is not None and not branch.possible[token]:
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


# Samples expected in a cell, at least. The chi-square approximation must hold for tail probabilities of 1e-4;
# the customary 5 is meant for tails of a few percent.
MIN_EXPECTED = 20.0


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a test."""

    statistic: float  # Pearson's statistic
    cells: int  # number of cells after merging; the degrees of freedom are one fewer
    p_value: float  # probability of a statistic at least this large if the distribution is right


def pearson(counts: Sequence[int], probabilities: Sequence[float], samples: int) -> ChiSquare:
    """Test whether counts follow a distribution."""
    merged = _merge_rare_cells(counts, [p * samples for p in probabilities])
    statistic = sum((count - expected) ** 2 / expected for count, expected in merged)
    return ChiSquare(statistic, len(merged), survival(statistic, len(merged) - 1))


def _merge_rare_cells(counts: Sequence[int], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Return (count, expected), the rarest cells by expectation merged until each has `MIN_EXPECTED`."""
    merged: list[tuple[float, float]] = []
    count_sum = expected_sum = 0.0
    for e, n in sorted(zip(expected, counts, strict=True), key=lambda pair: pair[0]):
        count_sum, expected_sum = count_sum + n, expected_sum + e
        if expected_sum >= MIN_EXPECTED:
            merged.append((count_sum, expected_sum))
            count_sum = expected_sum = 0.0
    if expected_sum > 0:
        count, e = merged.pop() if merged else (0.0, 0.0)
        merged.append((count + count_sum, e + expected_sum))
    return merged


def detectable_distance(samples: int, degrees: int, level: float, power: float) -> float:
    """Return the smallest total variation distance that a test detects."""
    if degrees < 1:
        return 1.0
    return min(1.0, math.sqrt(required_noncentrality(degrees, level, power) / (4 * samples)))


def detectable_probability(samples: int, power: float) -> float:
    """Return the smallest probability of an event that occurs at least once with probability `power`."""
    return -math.expm1(math.log1p(-power) / samples)


def samples_needed(distance: float, degrees: int, level: float, power: float) -> int:
    """Return the samples with which a test detects a distance; with 0 degrees there is one cell."""
    if degrees == 0:
        return math.ceil(math.log1p(-power) / math.log1p(-distance))
    return math.ceil(required_noncentrality(degrees, level, power) / (4 * distance**2))


def required_noncentrality(degrees: int, level: float, power: float) -> float:
    """Return the noncentrality parameter at which a test of this level has this power."""
    critical = critical_value(level, degrees)
    return _root(lambda noncentrality: noncentral_survival(critical, degrees, noncentrality) - power)


def critical_value(level: float, degrees: int) -> float:
    """Return the value that a chi-square variable exceeds with probability `level`."""
    return _root(lambda x: level - survival(x, degrees))


def survival(x: float, degrees: int) -> float:
    """Return P(chi-square > x); 1 without degrees of freedom, where the statistic is always 0."""
    if degrees == 0:
        return 1.0
    return float(_upper_gamma(torch.tensor([degrees / 2], dtype=torch.float64), x / 2))


def noncentral_survival(x: float, degrees: int, noncentrality: float) -> float:
    """Return P(noncentral chi-square > x): of central ones with degrees + 2 j, j Poisson."""
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 40  # the Poisson probability outside is below 1e-15
    first = max(0, math.floor(mean - spread))
    j = torch.arange(first, math.ceil(mean + spread), dtype=torch.float64)
    weights = torch.exp(torch.xlogy(j, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(j + 1))
    return float((weights * _upper_gamma(degrees / 2 + j, x / 2)).sum())


def _upper_gamma(shape: torch.Tensor, x: float) -> torch.Tensor:
    tail: torch.Tensor = torch.special.gammaincc(shape, torch.full_like(shape, x))
    return tail


def _root(increasing: Callable[[float], float]) -> float:
    """Return the x >= 0 at which an increasing function is 0, by bisection to a relative error of 1e-12."""
    low, high = 0.0, 1.0
    while increasing(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return high
