"""Expected rounds against enumeration, and τ against its formula."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from foredraft.tune.expected_rounds import ExpectedRounds


def enumerate_rounds(acceptance: NDArray[np.float64], length: int, draft: int, start: int = 0) -> float:
    """Expected rounds to the end of one text [N, K], by following every branch."""
    if start >= length:
        return 0.0
    total, survived = 1.0, 1.0
    for k in range(draft):
        accepted = acceptance[start, k]
        total += survived * (1 - accepted) * enumerate_rounds(acceptance, length, draft, start + k + 1)
        survived *= accepted
    return total + survived * enumerate_rounds(acceptance, length, draft, start + draft + 1)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_counts_equal_the_enumeration_of_all_branches(greedy: bool) -> None:
    random = np.random.default_rng(3)
    acceptance = random.random((3, 7, 3))
    if greedy:
        acceptance = (acceptance > 0.4).astype(float)
    lengths = np.array([7, 5, 1])
    found = ExpectedRounds.from_acceptance(acceptance, lengths).counts
    for draft in (1, 2, 3):
        each = [enumerate_rounds(acceptance[row], length, draft) for row, length in enumerate(lengths)]
        assert found[draft - 1] == pytest.approx(sum(each), rel=1e-12)


def test_tau_follows_the_formula_at_constant_acceptance() -> None:
    acceptance = np.full((2, 400, 4), 0.7)
    taus = ExpectedRounds.from_acceptance(acceptance, np.array([400, 400])).taus
    expected = [(1 - 0.7 ** (k + 1)) / (1 - 0.7) for k in range(1, 5)]
    assert taus == pytest.approx(expected, rel=1e-9)


def test_tau_weights_starts_as_decoding_visits_them() -> None:
    """Rounds take five tokens each in the accepted half of a text, and one in the rejected half."""
    flat = np.concatenate([np.ones(200), np.zeros(200 + 4)])
    acceptance = np.lib.stride_tricks.sliding_window_view(flat, 4)[None, :400]
    [tau] = ExpectedRounds.from_acceptance(acceptance, np.array([400])).taus[3:]
    assert tau == pytest.approx(400 / (200 / 5 + 200), rel=0.02)
    plain_mean = 1 + np.cumprod(acceptance, 2).sum(2).mean()
    assert plain_mean > 1.7 * tau


def test_acceptance_past_the_end_of_a_text_has_no_effect() -> None:
    random = np.random.default_rng(0)
    acceptance = random.random((1, 9, 3))
    other = acceptance.copy()
    other[0, 6:] = 1.0  # starts past the end of a text of 6
    assert np.array_equal(
        *(ExpectedRounds.from_acceptance(each, np.array([6])).counts for each in (acceptance, other))
    )


def test_tau_of_a_text_shorter_than_a_draft_is_tokens_per_round() -> None:
    acceptance = np.ones((1, 3, 4))
    found = ExpectedRounds.from_acceptance(acceptance, np.array([3]))
    assert found.taus.tolist() == [2.0, 3.0, 3.0, 3.0]
