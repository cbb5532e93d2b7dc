"""Alternating timed runs: medians of the pairs, and the exactness flag; test_generate.py has their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from foredraft.cli.job import Comparison, Generate, alternate


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def decoder(self, seconds: Callable[[int], float], tokens: list[list[int]]) -> Generate:
        runs = itertools.count()

        def generate() -> list[list[int]]:
            self.now += seconds(next(runs))
            return tokens

        return generate

    def compare(self, plain: Generate, speculative: Generate, **options: object) -> Comparison:
        return alternate(plain, speculative, clock=lambda: self.now, **{"comparable": True} | options)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_speedup_is_the_median_of_the_ratios_within_pairs(clock: Clock) -> None:
    tokens = [[1, 2, 3, 4]]
    # The machine runs at half speed in pairs 2 and 4. That leaves the ratios within the pairs unchanged, but the
    # medians of the plain and of the speculative runs, taken separately, would show no gain.
    plain = clock.decoder(lambda i: [9, 4, 8, 4, 8, 4][i], tokens)
    speculative = clock.decoder(lambda i: [9, 2, 4, 4, 4, 1][i], tokens)
    comparison = clock.compare(plain, speculative)
    assert comparison.speedups == pytest.approx((2, 2, 1, 2, 4))
    assert comparison.as_dict() == {
        "speedup": pytest.approx(2),
        "speedup_low": pytest.approx(1),
        "speedup_high": pytest.approx(4),
        "alternations": 5,
        "plain_tokens_per_second": pytest.approx(1),
        "speculative_tokens_per_second": pytest.approx(1),
        "identical": True,
    }


def test_one_differing_token_makes_the_outputs_not_identical(clock: Clock) -> None:
    plain, other = (clock.decoder(lambda i: 1, [[1, 2], [last]]) for last in (3, 4))
    assert clock.compare(plain, other).identical is False
    assert clock.compare(plain, other, comparable=False).identical is None


def test_the_speedup_is_the_ratio_of_tokens_per_second(clock: Clock) -> None:
    plain, other = clock.decoder(lambda i: 2, [[1] * 10]), clock.decoder(lambda i: 1, [[1] * 5])
    assert clock.compare(plain, other, comparable=False).speedup == pytest.approx(1)
