"""The chi-square test and what it says it would detect: against scipy, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from foredraft.verify.chi_square import (
    LEAST_EXPECTED,
    critical,
    detectable,
    pearson,
    required_shift,
    samples_for,
    shifted_survival,
    surely_seen,
    survival,
)

DEGREES = (1, 2, 6, 13, 40, 200)


@pytest.mark.parametrize("degrees", DEGREES)
def test_tails_are_scipys(degrees: int) -> None:
    for x in (0.0, 0.3, degrees / 2, degrees, 2.0 * degrees, degrees + 40.0, 300.0):
        assert survival(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-7, abs=1e-300)
        for shift in (1e-9, 0.5, 7.0, 45.0, 900.0):
            wanted = stats.ncx2.sf(x, degrees, shift)
            assert shifted_survival(x, degrees, shift) == pytest.approx(wanted, rel=1e-7, abs=1e-13)
    for level in (0.05, 1e-3 / 6, 1e-8):
        assert critical(level, degrees) == pytest.approx(stats.chi2.isf(level, degrees), rel=1e-8)


def test_without_a_shift_the_power_is_the_level() -> None:
    assert shifted_survival(critical(0.01, 5), 5, 0.0) == pytest.approx(0.01)
    assert required_shift(5, 0.01, 0.010001) == pytest.approx(0, abs=0.01)


def test_the_statistic_is_scipys() -> None:
    chances, counts = [0.5, 0.3, 0.15, 0.05], [530, 270, 160, 40]
    got = pearson(counts, chances, 1000)
    wanted = stats.chisquare(counts, [1000 * chance for chance in chances])
    assert got.cells == 4
    assert got.statistic == pytest.approx(wanted.statistic)
    assert got.p_value == pytest.approx(wanted.pvalue)


def test_rare_cells_are_merged_with_the_next_rarest() -> None:
    chances = [0.6, 0.002, 0.3, 0.003, 0.005, 0.09]  # expected: 1200, 4, 600, 6, 10, 180
    got = pearson([1190, 9, 600, 0, 12, 189], chances, 2000)
    assert got.cells == 4  # 4 + 6 + 10 make LEAST_EXPECTED
    wanted = stats.chisquare([21, 189, 600, 1190], [LEAST_EXPECTED, 180, 600, 1200])
    assert got.statistic == pytest.approx(wanted.statistic)


def test_what_is_left_over_joins_the_last_cell() -> None:
    got = pearson([70, 0, 30], [0.7, 0.05, 0.25], 100)
    assert got.cells == 2
    assert got.statistic == pytest.approx(stats.chisquare([30, 70], [30, 70]).statistic)
    alone = pearson([5, 4, 3], [0.5, 0.3, 0.2], 12)
    assert (alone.cells, alone.statistic, alone.p_value) == (1, 0.0, 1.0)


def test_samples_and_distance_are_inverse() -> None:
    for degrees in (1, 6, 40):
        for distance in (0.01, 0.03, 0.2):
            samples = samples_for(distance, degrees, 1e-4, 0.9)
            assert detectable(samples, degrees, 1e-4, 0.9) <= distance
            assert detectable(samples - 1, degrees, 1e-4, 0.9) > distance
    assert detectable(3, 6, 1e-4, 0.9) == 1.0
    assert detectable(10**9, 0, 1e-4, 0.9) == 1.0  # everything merged: nothing is ever found


def test_the_known_size_of_a_test() -> None:
    """By scipy alone: the shift at which the power is 0.9, and 4 N t^2 = shift."""
    at = stats.chi2.isf(1e-3 / 6, 6)
    samples = samples_for(0.03, 6, 1e-3 / 6, 0.9)
    assert stats.ncx2.sf(at, 6, 4 * samples * 0.03**2) == pytest.approx(0.9, abs=1e-4)


def test_a_certain_law_is_left_by_a_single_sample() -> None:
    assert surely_seen(76, 0.9) <= 0.03 < surely_seen(75, 0.9)
    assert samples_for(0.03, 0, 1e-4, 0.9) == 76
    assert 1 - (1 - surely_seen(50, 0.9)) ** 50 == pytest.approx(0.9)


# --- power by simulation ----------------------------------------------------------------------------

LAWS = {
    "even": [0.125] * 8,
    "as it comes": [0.31, 0.19, 0.16, 0.12, 0.1, 0.06, 0.04, 0.02],
    "one likely": [0.86, 0.06, 0.03, 0.02, 0.02, 0.01],
}
LEVEL, POWER, TRIALS = 1e-3 / 6, 0.9, 1500


def share_found(chances: np.ndarray, shifted: np.ndarray, samples: int, trials: int = TRIALS) -> float:
    counts = np.random.default_rng(5).multinomial(samples, shifted, size=trials)
    return float(np.mean([pearson(c, chances.tolist(), samples).p_value < LEVEL for c in counts.tolist()]))


def directions(chances: np.ndarray, distance: float) -> dict[str, np.ndarray]:
    """Laws at exactly this total variation: in proportion, from the likely to the rare, between two cells."""
    order = np.arange(len(chances))
    side = np.zeros(len(chances), dtype=bool)
    for cell in order:  # the subset that comes closest to half the mass: the worst direction
        side[cell] = chances[side].sum() + chances[cell] <= 0.5 + 1e-9
    if not side.any():
        side[1:] = True
    step = np.where(side, chances / chances[side].sum(), -chances / chances[~side].sum())
    to_rare = np.zeros(len(chances))
    to_rare[0], to_rare[-1] = -1, 1
    between = np.zeros(len(chances))
    between[0], between[1] = 1, -1
    found = {"in proportion": step, "to the rarest": to_rare, "between two": between}
    return {name: chances + distance * d for name, d in found.items()}


@pytest.mark.parametrize("name", LAWS)
def test_planted_shifts_are_found_as_often_as_promised(name: str) -> None:
    chances = np.array(LAWS[name])
    samples = samples_for(0.03, len(chances) - 1, LEVEL, POWER)
    for direction, shifted in directions(chances, 0.03).items():
        assert np.abs(shifted - chances).sum() / 2 == pytest.approx(0.03)
        found = share_found(chances, shifted, samples)
        assert found > POWER - 0.025, direction
        if name == "even" and direction == "in proportion":  # the bound is met with equality
            assert found < POWER + 0.025


def test_a_smaller_shift_is_found_less_often() -> None:
    chances = np.array(LAWS["even"])
    samples = samples_for(0.03, 7, LEVEL, POWER)
    assert share_found(chances, directions(chances, 0.015)["in proportion"], samples) < 0.3


def test_the_true_law_is_hardly_ever_refused() -> None:
    chances = np.array(LAWS["as it comes"])
    assert share_found(chances, chances, 10_000, trials=20_000) < 6e-4  # 1.7e-4 expected


def test_cells_of_equal_chance_are_merged_whatever_they_hold() -> None:
    """Merging by the counts, low with low, would reject a true law far too often."""
    random, rejected = np.random.default_rng(0), 0
    for _ in range(400):
        counts = random.multinomial(120, [1 / 40] * 40)  # 3 expected in each, so that cells are merged
        rejected += pearson(counts.tolist(), [1 / 40] * 40, 120).p_value < 0.01
    assert rejected < 20
