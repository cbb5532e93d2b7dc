"""The alternation: warmed up, interleaved in flipping order, medians of pairs, and the exactness flag."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.cli.compare import Comparison, Generate, alternate


class World:
    """A clock that only generation moves, and a diary of what ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def decoder(self, name: str, seconds: Callable[[int], float], tokens: list[list[int]]) -> Generate:
        def generate() -> list[list[int]]:
            self.now += seconds(self.ran.count(name))
            self.ran.append(name)
            return tokens

        return generate


def compare(world: World, plain: Generate, speculative: Generate, **options: object) -> Comparison:
    return alternate(plain, speculative, clock=lambda: world.now, **{"comparable": True} | options)


def test_runs_alternate_in_flipping_order_after_a_warm_up() -> None:
    world = World()
    tokens = [[1, 2]]
    compare(world, world.decoder("p", lambda i: 1, tokens), world.decoder("s", lambda i: 1, tokens))
    assert "".join(world.ran) == "ps" + "ps" + "sp" + "ps" + "sp" + "ps"


def test_speedup_is_the_median_of_the_ratios_within_pairs() -> None:
    world = World()
    tokens = [[1, 2, 3, 4]]
    # The machine runs at half speed in pairs 2 and 4: the ratios within the pairs do not care, whereas the
    # medians of either kind of run, apart, would say that nothing was gained.
    plain = world.decoder("p", lambda i: [9, 4, 8, 4, 8, 4][i], tokens)
    speculative = world.decoder("s", lambda i: [9, 2, 4, 4, 4, 1][i], tokens)
    comparison = compare(world, plain, speculative)
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


def test_one_differing_token_anywhere_shows() -> None:
    world = World()
    plain = world.decoder("p", lambda i: 1, [[1, 2], [3]])
    other = world.decoder("s", lambda i: 1, [[1, 2], [4]])
    assert compare(world, plain, other).identical is False
    assert compare(world, plain, other, comparable=False).identical is None


def test_rates_count_tokens_so_that_unequal_outputs_compare_fairly() -> None:
    world = World()
    plain = world.decoder("p", lambda i: 2, [[1] * 10])
    other = world.decoder("s", lambda i: 1, [[1] * 5])
    assert compare(world, plain, other, comparable=False).speedup == pytest.approx(1)


def test_progress_reaches_the_end() -> None:
    world = World()
    seen: list[tuple[int, int]] = []
    run = world.decoder("p", lambda i: 1, [[1]])
    compare(world, run, run, alternations=6, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 14) for i in range(1, 15)]
