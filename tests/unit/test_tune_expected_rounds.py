"""Expected rounds against enumeration, and why a plain mean over drafts would not do."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from foredraft.tune.expected_rounds import Rounds


def enumerated(chances: NDArray[np.float64], length: int, draft: int, start: int = 0) -> float:
    """Rounds to the end of one text [N, K], by following every branch."""
    if start >= length:
        return 0.0
    total, survived = 1.0, 1.0
    for k in range(draft):
        chance = chances[start, k]
        total += survived * (1 - chance) * enumerated(chances, length, draft, start + k + 1)
        survived *= chance
    return total + survived * enumerated(chances, length, draft, start + draft + 1)


@pytest.mark.parametrize("certain", [True, False], ids=["greedy", "sampled"])
def test_rounds_are_those_of_every_branch(certain: bool) -> None:
    random = np.random.default_rng(3)
    chances = random.random((3, 7, 3))
    if certain:
        chances = (chances > 0.4).astype(float)
    lengths = np.array([7, 5, 1])
    found = Rounds.of(chances, lengths).counts
    for draft in (1, 2, 3):
        each = [enumerated(chances[row], length, draft) for row, length in enumerate(lengths)]
        assert found[draft - 1] == pytest.approx(sum(each), rel=1e-12)


def test_tau_is_the_formula_where_the_chance_is_constant() -> None:
    chances = np.full((2, 400, 4), 0.7)
    taus = Rounds.of(chances, np.array([400, 400])).taus
    expected = [(1 - 0.7 ** (k + 1)) / (1 - 0.7) for k in range(1, 5)]
    assert taus == pytest.approx(expected, rel=1e-9)


def test_starts_count_as_decoding_visits_them() -> None:
    """Half of a text certain, half of it impossible: drafts leap over the one and crawl through the other."""
    flat = np.concatenate([np.ones(200), np.zeros(200 + 4)])
    chances = np.lib.stride_tricks.sliding_window_view(flat, 4)[None, :400]
    [tau] = Rounds.of(chances, np.array([400])).taus[3:]
    assert tau == pytest.approx(400 / (200 / 5 + 200), rel=0.02)
    over_all_places = 1 + np.cumprod(chances, 2).sum(2).mean()
    assert over_all_places > 1.7 * tau


def test_what_lies_past_a_text_counts_for_nothing() -> None:
    random = np.random.default_rng(0)
    chances = random.random((1, 9, 3))
    other = chances.copy()
    other[0, 6:] = 1.0  # starts past the end of a text of 6
    assert np.array_equal(*(Rounds.of(each, np.array([6])).counts for each in (chances, other)))


def test_texts_too_short_for_a_whole_draft_give_their_own_mean() -> None:
    chances = np.ones((1, 3, 4))
    found = Rounds.of(chances, np.array([3]))
    assert found.taus.tolist() == [2.0, 3.0, 3.0, 3.0]
