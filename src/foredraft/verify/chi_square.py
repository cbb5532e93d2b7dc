"""Pearson's chi-square test of counts against a known distribution, and its power.

The statistic X = sum (n_i - N p_i)^2 / (N p_i) over m cells has, under the distribution p, approximately
the chi-square distribution with m - 1 degrees of freedom (Pearson 1900). If the samples follow p + d
instead, it is approximately noncentral chi-square with noncentrality parameter N sum d_i^2 / p_i (Patnaik
1949, "The non-central chi-square and F-distributions and their applications", Biometrika 36; Cohen 1988,
"Statistical Power Analysis for the Behavioral Sciences", chapter 7).

The total variation distance of the two distributions over the cells is t = sum |d_i| / 2. By the
Cauchy-Schwarz inequality,

    4 t^2 = (sum |d_i|)^2 = (sum |d_i| / sqrt(p_i) * sqrt(p_i))^2 <= sum d_i^2 / p_i * sum p_i,  sum p_i = 1,

with equality where |d_i| = 2 t p_i. So for every d of total variation t, the noncentrality parameter is at
least 4 N t^2, and the power at least the power at that value. The functions below use this lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ChiSquare", "detectable_distance", "detectable_probability", "pearson", "samples_needed"]

# Samples expected in a cell, at least. The chi-square approximation must hold for tail probabilities of 1e-4;
# the customary 5 is meant for tails of a few percent.
MIN_EXPECTED = 20.0


@dataclass(frozen=True, slots=True)
class ChiSquare:
    """The result of a test.

    Attributes:
        statistic: Pearson's statistic.
        cells: Number of cells after merging; the degrees of freedom are one fewer.
        p_value: Probability of a statistic at least this large if the distribution is right.
    """

    statistic: float
    cells: int
    p_value: float


def pearson(counts: Sequence[int], probabilities: Sequence[float], samples: int) -> ChiSquare:
    """Test whether counts follow a distribution.

    Args:
        counts: Number of samples in each cell.
        probabilities: Probability of each cell; they sum to 1.
        samples: Number of samples.
    """
    merged = _merge_rare_cells(counts, [p * samples for p in probabilities])
    statistic = sum((count - expected) ** 2 / expected for count, expected in merged)
    return ChiSquare(statistic, len(merged), survival(statistic, len(merged) - 1))


def _merge_rare_cells(counts: Sequence[int], expected: Sequence[float]) -> list[tuple[float, float]]:
    """Return (count, expected) with cells merged, the rarest first, until each has `MIN_EXPECTED`.

    The order depends on the expectations only: merging by the counts would bias the test.
    """
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
    """Return the smallest total variation distance that a test detects.

    Args:
        samples: Number of samples.
        degrees: Degrees of freedom.
        level: Significance level of the test.
        power: Probability of detection, at least, for every distribution at that distance.

    Returns:
        The distance over the cells; 1 if the test detects nothing.
    """
    if degrees < 1:
        return 1.0
    return min(1.0, math.sqrt(required_noncentrality(degrees, level, power) / (4 * samples)))


def detectable_probability(samples: int, power: float) -> float:
    """Return the smallest probability of an event that occurs at least once with probability `power`.

    This is the detectable distance of a distribution with a single cell: one sample outside of it fails the
    test.
    """
    return -math.expm1(math.log1p(-power) / samples)


def samples_needed(distance: float, degrees: int, level: float, power: float) -> int:
    """Return the number of samples with which a test detects a total variation distance.

    The inverse of `detectable_distance`, and of `detectable_probability` where there is a single cell.
    """
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
    """Return P(noncentral chi-square > x).

    The noncentral distribution is a mixture of central ones with degrees + 2 j degrees of freedom, where j is
    Poisson with mean noncentrality / 2.
    """
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
