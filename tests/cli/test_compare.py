"""Alternating timed runs: warm-up, flipping order, medians of the pairs, and the exactness flag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.cli.compare import Comparison, Generate, alternate


class FakeDecoders:
    """Decoders that advance a fake clock, and a record of the runs.

    Attributes:
        now: The clock, in seconds.
        ran: Names of the decoders in the order of their runs.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def make(self, name: str, seconds: Callable[[int], float], tokens: list[list[int]]) -> Generate:
        """Return a decoder whose i-th run takes `seconds(i)`."""

        def generate() -> list[list[int]]:
            self.now += seconds(self.ran.count(name))
            self.ran.append(name)
            return tokens

        return generate


def compare(decoders: FakeDecoders, plain: Generate, speculative: Generate, **options: object) -> Comparison:
    return alternate(plain, speculative, clock=lambda: decoders.now, **{"comparable": True} | options)


def test_runs_alternate_in_flipping_order_after_a_warm_up() -> None:
    decoders = FakeDecoders()
    tokens = [[1, 2]]
    compare(decoders, decoders.make("p", lambda i: 1, tokens), decoders.make("s", lambda i: 1, tokens))
    assert "".join(decoders.ran) == "ps" + "ps" + "sp" + "ps" + "sp" + "ps"


def test_speedup_is_the_median_of_the_ratios_within_pairs() -> None:
    decoders = FakeDecoders()
    tokens = [[1, 2, 3, 4]]
    # The machine runs at half speed in pairs 2 and 4. That leaves the ratios within the pairs unchanged, but the
    # medians of the plain and of the speculative runs, taken separately, would show no gain.
    plain = decoders.make("p", lambda i: [9, 4, 8, 4, 8, 4][i], tokens)
    speculative = decoders.make("s", lambda i: [9, 2, 4, 4, 4, 1][i], tokens)
    comparison = compare(decoders, plain, speculative)
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


def test_one_differing_token_makes_the_outputs_not_identical() -> None:
    decoders = FakeDecoders()
    plain = decoders.make("p", lambda i: 1, [[1, 2], [3]])
    other = decoders.make("s", lambda i: 1, [[1, 2], [4]])
    assert compare(decoders, plain, other).identical is False
    assert compare(decoders, plain, other, comparable=False).identical is None


def test_the_speedup_is_the_ratio_of_tokens_per_second() -> None:
    decoders = FakeDecoders()
    plain = decoders.make("p", lambda i: 2, [[1] * 10])
    other = decoders.make("s", lambda i: 1, [[1] * 5])
    assert compare(decoders, plain, other, comparable=False).speedup == pytest.approx(1)


def test_progress_reaches_the_end() -> None:
    decoders = FakeDecoders()
    seen: list[tuple[int, int]] = []
    run = decoders.make("p", lambda i: 1, [[1]])
    compare(decoders, run, run, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 12) for i in range(1, 13)]
