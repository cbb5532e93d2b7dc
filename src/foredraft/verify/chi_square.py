"""Pearson's chi-square test of counts against a known law, and what it would have detected.

The statistic X = sum (n_i - N p_i)^2 / (N p_i) over m cells has, under the law p, approximately the
chi-square distribution with m - 1 degrees of freedom (Pearson 1900). If the samples come of another law
p + d instead, it is approximately non-central with shift N sum d_i^2 / p_i (Patnaik 1949, "The non-central
chi-square and F-distributions and their applications", Biometrika 36; Cohen 1988, "Statistical Power Analysis
for the Behavioral Sciences", chapter 7).

The total variation distance of the two laws over the cells is t = sum |d_i| / 2. By the Cauchy-Schwarz
inequality,

    4 t^2 = (sum |d_i|)^2 = (sum |d_i| / sqrt(p_i) * sqrt(p_i))^2 <= sum d_i^2 / p_i * sum p_i,  sum p_i = 1,

with equality where |d_i| = 2 t p_i. So whatever the direction of a departure of t, the shift is at least
4 N t^2, and the power at least that of this shift: the statement below is of the worst direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Outcome", "detectable", "pearson", "samples_for", "surely_seen"]

# The approximation is asked for a tail of 1e-4 or so; the customary 5 is meant for tails of some percent.
LEAST_EXPECTED = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """cells: those left after merging; the test has one degree of freedom fewer."""

    statistic: float
    cells: int
    p_value: float


def pearson(counts: Sequence[int], chances: Sequence[float], samples: int) -> Outcome:
    """Test `counts` of cells that each of `samples` draws falls into with `chances`, which sum to 1."""
    merged = _merged(counts, [chance * samples for chance in chances])
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in merged)
    return Outcome(statistic, len(merged), survival(statistic, len(merged) - 1))


def _merged(counts: Sequence[int], expected: Sequence[float]) -> list[tuple[float, float]]:
    """(seen, expected) with cells merged, from the rarest on, until each is expected often enough."""
    merged: list[tuple[float, float]] = []
    seen_so_far = expected_so_far = 0.0
    for e, n in sorted(zip(expected, counts, strict=True), key=lambda pair: pair[0]):
        seen_so_far, expected_so_far = seen_so_far + n, expected_so_far + e
        if expected_so_far >= LEAST_EXPECTED:
            merged.append((seen_so_far, expected_so_far))
            seen_so_far = expected_so_far = 0.0
    if expected_so_far > 0:
        seen, e = merged.pop() if merged else (0.0, 0.0)
        merged.append((seen + seen_so_far, e + expected_so_far))
    return merged


def detectable(samples: int, degrees: int, level: float, power: float) -> float:
    """The least total variation over the cells that the test at `level` finds with probability `power`,
    whatever its direction; 1 where it finds nothing."""
    if degrees < 1:
        return 1.0
    return min(1.0, math.sqrt(required_shift(degrees, level, power) / (4 * samples)))


def surely_seen(samples: int, power: float) -> float:
    """The least probability of an event that shows at least once with probability `power`: what is detectable
    where the law leaves one cell, so that a single sample outside of it tells."""
    return -math.expm1(math.log1p(-power) / samples)


def samples_for(distance: float, degrees: int, level: float, power: float) -> int:
    """Samples with which `detectable` is at most `distance`, or `surely_seen` where there is one cell."""
    if degrees == 0:
        return math.ceil(math.log1p(-power) / math.log1p(-distance))
    return math.ceil(required_shift(degrees, level, power) / (4 * distance**2))


def required_shift(degrees: int, level: float, power: float) -> float:
    """The shift at which the test at `level` rejects with probability `power`."""
    at = critical(level, degrees)
    return _crossing(lambda shift: shifted_survival(at, degrees, shift) - power)


def critical(level: float, degrees: int) -> float:
    """The value that the statistic exceeds with probability `level` under the law."""
    return _crossing(lambda x: level - survival(x, degrees))


def survival(x: float, degrees: int) -> float:
    """P(chi-square with `degrees` > x); with none, the statistic is 0 and means nothing."""
    if degrees == 0:
        return 1.0
    return float(_upper_gamma(torch.tensor([degrees / 2], dtype=torch.float64), x / 2))


def shifted_survival(x: float, degrees: int, shift: float) -> float:
    """P(non-central chi-square > x): the mixture of central ones with degrees + 2 j degrees of freedom, j
    Poisson with mean shift / 2."""
    mean = shift / 2
    spread = 12 * math.sqrt(mean) + 40  # what is left out weighs less than 1e-15
    first = max(0, math.floor(mean - spread))
    j = torch.arange(first, math.ceil(mean + spread), dtype=torch.float64)
    weights = torch.exp(torch.xlogy(j, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(j + 1))
    return float((weights * _upper_gamma(degrees / 2 + j, x / 2)).sum())


def _upper_gamma(shape: torch.Tensor, x: float) -> torch.Tensor:
    tail: torch.Tensor = torch.special.gammaincc(shape, torch.full_like(shape, x))
    return tail


def _crossing(rising: Callable[[float], float]) -> float:
    """Where a rising function of x >= 0 crosses zero, by bisection to the last bit that matters."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
