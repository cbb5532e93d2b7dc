"""Chi-square: samples against an exact distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from scipy.stats import chi2

from tests.support.distributions import Distribution

LEAST = 1e-4  # a right distribution fails once in ten thousand; seeds are fixed, so a test that passes keeps passing


def p_value(samples: Iterable[Iterable[int]], distribution: Distribution) -> float:
    """Merge cells from the rarest on until each is expected five times; an impossible sample gives zero."""
    counts = Counter(tuple(sample) for sample in samples)
    if not set(counts) <= set(distribution):
        return 0.0
    total = sum(counts.values())
    cells = [(chance * total, counts[output]) for output, chance in distribution.items()]
    merged: list[list[float]] = [[0.0, 0.0]]
    for expected, seen in sorted(cells, key=lambda cell: cell[0]):
        if merged[-1][0] >= 5:
            merged.append([0.0, 0.0])
        merged[-1][0] += expected
        merged[-1][1] += seen
    if len(merged) > 1 and merged[-1][0] < 5:
        expected, seen = merged.pop()
        merged[-1][0] += expected
        merged[-1][1] += seen
    if len(merged) == 1:
        return 1.0
    expected, seen = np.array(merged).T
    return float(chi2.sf(((seen - expected) ** 2 / expected).sum(), len(merged) - 1))


def assert_distributed(samples: Iterable[Iterable[int]], distribution: Distribution, name: str = "") -> None:
    chance = p_value(list(samples), distribution)
    assert chance > LEAST, f"{name}: p = {chance:.2e}"
