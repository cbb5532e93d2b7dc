"""Tests by draft position: tokens are counted where a draft gave them, and the stated power is reached."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch

from foredraft.decode.stats import RoundTrace
from foredraft.verify.chi_square import Cells
from foredraft.verify.distribution_tests import PositionCounts
from foredraft.verify.verify_records import DraftPosition

LENGTH, GAMMA, VOCABULARY = 4, 3, 5
P = np.array([0.4, 0.3, 0.15, 0.1, 0.05])  # the target's distribution, whatever the text before
Q = np.array([0.6, 0.1, 0.1, 0.1, 0.1])  # the drafter's
LEVEL, POWER = 1e-3, 0.9
Correction = Callable[[int], np.ndarray]


def cells() -> Cells:
    return Cells.of(lambda prefix: torch.from_numpy(P), (3, 2, 1, 1))


def rounds(start: int, draft: list[int], accepted: int) -> RoundTrace:
    return RoundTrace(start, "draft", len(draft), draft, [], [], accepted, 0, 0.0, accepted + 1)


def residual(position: int) -> np.ndarray:
    left = np.maximum(P - Q, 0)
    return left / left.sum()


def sampled(random: Random, correction: Correction = residual) -> tuple[list[int], list[RoundTrace]]:
    """Sample a text by the speculative rule; correction: draft position -> distribution of a correction."""
    tokens: list[int] = []
    trace: list[RoundTrace] = []
    while len(tokens) < LENGTH:
        draft = random.choices(range(VOCABULARY), Q, k=min(GAMMA, LENGTH - len(tokens) - 1))
        kept = [random.random() * Q[token] < P[token] for token in draft]
        accepted = [*kept, False].index(False)
        last = correction(accepted) if accepted < len(draft) else P
        trace.append(rounds(len(tokens), draft, accepted))
        tokens += [*draft[:accepted], *random.choices(range(VOCABULARY), last)]
    return tokens, trace


def results_of(seed: int, samples: int, correction: Correction = residual) -> list[DraftPosition]:
    random, counts = Random(seed), PositionCounts(cells(), GAMMA)
    for _ in range(samples):
        counts.add(*sampled(random, correction))
    return list(counts.tests(LEVEL, POWER))


def test_tokens_are_counted_at_their_position_in_the_draft() -> None:
    counts = PositionCounts(cells(), GAMMA)
    # one accepted and a correction, then a plain step, which no draft gave, and a draft accepted whole
    counts.add([0, 1, 0, 0], [rounds(0, [0, 4, 4], 1), rounds(2, [], 0), rounds(3, [], 0)])
    assert (counts.corrections, counts.bonuses) == ([0, 1, 0, 0], 0)
    counts.add([0, 0, 0, 0], [rounds(0, [0, 0, 0], 3)])
    assert (counts.corrections, counts.bonuses) == ([0, 1, 0, 0], 1)
    # a rejection at once; the next round's draft begins at position 0 again
    counts.add([1, 0, 1, 1], [rounds(0, [3, 3, 3], 0), rounds(1, [0, 2], 1), rounds(3, [], 0)])
    assert (counts.corrections, counts.bonuses) == ([1, 2, 0, 0], 1)


def test_tokens_after_a_text_that_the_cells_do_not_separate_are_left_out() -> None:
    counts = PositionCounts(cells(), GAMMA)
    counts.add([4, 0, 0, 0], [rounds(0, [4, 0, 0], 3)])  # token 4 is in the rest of the first position
    first, *others = counts.tests(LEVEL, POWER)
    assert (counts.bonuses, counts.corrections[1:], [each.tokens for each in others]) == (0, [0] * 3, [0] * 3)
    assert first.position == 0


def test_a_cut_draft_counts_as_far_as_it_was_emitted() -> None:
    counts = PositionCounts(cells(), GAMMA)
    cut = RoundTrace(0, "draft", 3, [0, 0, 0], [], [], 3, 0, 0.0, 2)
    counts.add([0, 0], [cut])
    assert counts.bonuses == 0


@pytest.mark.heavy
def test_lossless_samples_are_rejected_at_the_level() -> None:
    results = [results_of(seed, 300) for seed in range(40)]
    low = [each.p_value < 0.05 for result in results for each in result if each.degrees]
    assert 0.015 < np.mean(low) < 0.09
    assert not any(each.failed for result in results for each in result)


@pytest.mark.parametrize("wrong", range(GAMMA))
def test_a_wrong_correction_fails_the_test_of_its_position_alone(wrong: int) -> None:
    result = results_of(3, 4000, lambda position: P if position == wrong else residual(position))
    assert [each.passed for each in result] == [each.position != wrong for each in result]


@pytest.mark.heavy
@pytest.mark.parametrize("position", range(GAMMA))
def test_the_stated_distance_of_corrections_is_detected_with_the_power(position: int) -> None:
    [result] = [each for each in results_of(0, 1200) if each.position == position]
    shift = result.detectable_correction
    assert 0 < shift < 1
    toward = np.zeros(VOCABULARY)
    toward[0] = 1.0  # no correction gives this token
    wrong = (1 - shift) * residual(0) + shift * toward
    assert np.abs(wrong - residual(0)).sum() / 2 == pytest.approx(shift)
    found = [
        not results_of(seed, 1200, lambda at: wrong if at == position else residual(at))[position].passed
        for seed in range(1, 9)
    ]
    assert np.mean(found) >= 0.85


def test_too_few_tokens_neither_pass_nor_fail() -> None:
    for each in results_of(0, 3):
        assert (each.tokens, each.degrees, each.detectable) == (0, 0, 1.0)
        assert (each.tested, each.passed, each.failed) == (False, False, False)
        assert each.detectable_correction == 1.0
