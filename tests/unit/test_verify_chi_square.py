"""The chi-square test and its power: against scipy, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from foredraft.verify.chi_square import (
    MIN_EXPECTED,
    critical_value,
    detectable_distance,
    detectable_probability,
    noncentral_survival,
    pearson,
    required_noncentrality,
    samples_needed,
    survival,
)

DEGREES = (1, 2, 6, 13, 40, 200)


@pytest.mark.parametrize("degrees", DEGREES)
def test_tail_probabilities_equal_scipys(degrees: int) -> None:
    for x in (0.0, 0.3, degrees / 2, degrees, 2.0 * degrees, degrees + 40.0, 300.0):
        assert survival(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-7, abs=1e-300)
        for noncentrality in (1e-9, 0.5, 7.0, 45.0, 900.0):
            found, wanted = (sf(x, degrees, noncentrality) for sf in (noncentral_survival, stats.ncx2.sf))
            assert found == pytest.approx(wanted, rel=1e-7, abs=1e-13)
    for level in (0.05, 1e-3 / 6, 1e-8):
        assert critical_value(level, degrees) == pytest.approx(stats.chi2.isf(level, degrees), rel=1e-8)


def test_the_power_of_a_central_distribution_is_the_level() -> None:
    assert noncentral_survival(critical_value(0.01, 5), 5, 0.0) == pytest.approx(0.01)
    assert required_noncentrality(5, 0.01, 0.010001) == pytest.approx(0, abs=0.01)


def test_the_statistic_equals_scipys() -> None:
    probabilities, counts = [0.5, 0.3, 0.15, 0.05], [530, 270, 160, 40]
    got = pearson(counts, probabilities, 1000)
    wanted = stats.chisquare(counts, [1000 * p for p in probabilities])
    assert got.cells == 4
    assert got.statistic == pytest.approx(wanted.statistic)
    assert got.p_value == pytest.approx(wanted.pvalue)


def test_rare_cells_are_merged_with_the_next_rarest() -> None:
    probabilities = [0.6, 0.002, 0.3, 0.003, 0.005, 0.09]  # expected: 1200, 4, 600, 6, 10, 180
    got = pearson([1190, 9, 600, 0, 12, 189], probabilities, 2000)
    assert got.cells == 4  # 4 + 6 + 10 make MIN_EXPECTED
    wanted = stats.chisquare([21, 189, 600, 1190], [MIN_EXPECTED, 180, 600, 1200])
    assert got.statistic == pytest.approx(wanted.statistic)


def test_leftover_cells_join_the_last_merged_cell() -> None:
    got = pearson([70, 0, 30], [0.7, 0.05, 0.25], 100)
    assert got.cells == 2
    assert got.statistic == pytest.approx(stats.chisquare([30, 70], [30, 70]).statistic)
    alone = pearson([5, 4, 3], [0.5, 0.3, 0.2], 12)
    assert (alone.cells, alone.statistic, alone.p_value) == (1, 0.0, 1.0)


def test_samples_needed_inverts_the_detectable_distance() -> None:
    for degrees in (1, 6, 40):
        for distance in (0.01, 0.03, 0.2):
            samples = samples_needed(distance, degrees, 1e-4, 0.9)
            assert detectable_distance(samples, degrees, 1e-4, 0.9) <= distance
            assert detectable_distance(samples - 1, degrees, 1e-4, 0.9) > distance
    assert detectable_distance(3, 6, 1e-4, 0.9) == 1.0
    assert detectable_distance(10**9, 0, 1e-4, 0.9) == 1.0  # all cells are merged: no difference is detected


def test_samples_needed_give_the_power_by_scipy() -> None:
    """scipy alone says: at the noncentrality parameter 4 N t^2, the power is 0.9."""
    at = stats.chi2.isf(1e-3 / 6, 6)
    samples = samples_needed(0.03, 6, 1e-3 / 6, 0.9)
    assert stats.ncx2.sf(at, 6, 4 * samples * 0.03**2) == pytest.approx(0.9, abs=1e-4)


def test_one_sample_outside_a_single_cell_is_detected() -> None:
    assert detectable_probability(76, 0.9) <= 0.03 < detectable_probability(75, 0.9)
    assert samples_needed(0.03, 0, 1e-4, 0.9) == 76
    assert 1 - (1 - detectable_probability(50, 0.9)) ** 50 == pytest.approx(0.9)


# --- power by simulation ----------------------------------------------------------------------------

DISTRIBUTIONS = {
    "even": [0.125] * 8,
    "uneven": [0.31, 0.19, 0.16, 0.12, 0.1, 0.06, 0.04, 0.02],
    "one likely cell": [0.86, 0.06, 0.03, 0.02, 0.02, 0.01],
}
LEVEL, POWER, TRIALS = 1e-3 / 6, 0.9, 1500


def detection_rate(p: np.ndarray, shifted: np.ndarray, samples: int, trials: int = TRIALS) -> float:
    counts = np.random.default_rng(5).multinomial(samples, shifted, size=trials)
    return float(np.mean([pearson(c, p.tolist(), samples).p_value < LEVEL for c in counts.tolist()]))


def directions(p: np.ndarray, distance: float) -> dict[str, np.ndarray]:
    """Distributions at this total variation distance from p; one in proportion to p is the worst case."""
    order = np.arange(len(p))
    side = np.zeros(len(p), dtype=bool)
    for cell in order:  # the subset with about half of the probability: the worst case
        side[cell] = p[side].sum() + p[cell] <= 0.5 + 1e-9
    if not side.any():
        side[1:] = True
    step = np.where(side, p / p[side].sum(), -p / p[~side].sum())
    to_rare = np.zeros(len(p))
    to_rare[0], to_rare[-1] = -1, 1
    between = np.zeros(len(p))
    between[0], between[1] = 1, -1
    found = {"in proportion": step, "to the rarest": to_rare, "between two": between}
    return {name: p + distance * d for name, d in found.items()}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_detection_rate_reaches_the_power_in_every_direction(name: str) -> None:
    p = np.array(DISTRIBUTIONS[name])
    samples = samples_needed(0.03, len(p) - 1, LEVEL, POWER)
    for direction, shifted in directions(p, 0.03).items():
        assert np.abs(shifted - p).sum() / 2 == pytest.approx(0.03)
        rate = detection_rate(p, shifted, samples)
        assert rate > POWER - 0.025, direction
        if name == "even" and direction == "in proportion":  # the bound is met with equality
            assert rate < POWER + 0.025


def test_the_true_distribution_is_rejected_at_the_level() -> None:
    p = np.array(DISTRIBUTIONS["uneven"])
    assert detection_rate(p, p, 10_000, trials=20_000) < 6e-4  # 1.7e-4 expected


def test_merging_does_not_depend_on_the_counts() -> None:
    """Merging low counts with low counts would reject a true distribution far too often."""
    random, rejected = np.random.default_rng(0), 0
    for _ in range(400):
        counts = random.multinomial(120, [1 / 40] * 40)  # 3 expected in each, so that cells are merged
        rejected += pearson(counts.tolist(), [1 / 40] * 40, 120).p_value < 0.01
    assert rejected < 20
