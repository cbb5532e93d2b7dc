"""Costs, acceptance and draft lengths of the cost policy: pure functions, each against its definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.decode.policy import Decision
from foredraft.decode.policy.auto import HeldDecision, _together
from foredraft.decode.policy.budgets import (
    AcceptanceEstimate,
    Candidate,
    TreeShape,
    best_budgets,
    best_length,
)
from foredraft.decode.policy.cost_table import CostTable, round_ms
from foredraft.decode.stats import Round
from tests.support.simulation import flat


def test_costs_lie_on_lines_between_measured_ones() -> None:
    drafts = {"small": {1: (0.3, 0.2), 5: (0.7, 0.6)}}
    table = CostTable({1: {1: 1.0, 5: 2.0, 9: 4.0}, 4: {4: 3.0, 8: 5.0}}, drafts)
    assert [table.verify(1, n) for n in (1, 3, 5, 7, 9, 11)] == [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert [table.verify(4, n) for n in (4, 6, 8, 10)] == [3.0, 4.0, 5.0, 6.0]
    assert table.verify(3, 5) == pytest.approx(1.5 / 3 + 4.0 * 2 / 3), "two drafted columns in both batches"
    assert table.verify(6, 8) == table.verify(4, 6), "the last batch serves beyond it"
    assert [table.draft("small", 2, n) for n in (0, 1, 3)] == pytest.approx([0.0, 0.4, 1.0])
    assert table.draft("small", 9, 2) == pytest.approx(1.3)
    assert table.draft("unknown", 4, 2) == pytest.approx(2 * 0.25 * 3.0), "a quarter of a plain step each"
    assert CostTable({1: {1: 3.0, 2: 1.0, 3: 2.0}}, {}).passes == {1: [(1, 1.0), (2, 1.0), (3, 2.0)]}


def test_a_round_costs_its_drafts_and_its_pass() -> None:
    table = CostTable({3: {3: 2.0, 9: 5.0}}, {"small": {3: (0.3, 0.1)}, "other": {3: (0.5, 0.2)}})
    rows = [("small", 3, 0), ("other", 1, 0), ("small", 2, 0)]
    assert round_ms(table, rows) == pytest.approx((0.3 + 2 * 0.1) + 0.5 + (2.0 + 0.5 * 6)), "rows share steps"
    assert round_ms(table, [(None, 0, 0)] * 3) == 2.0


def test_siblings_cost_their_columns_and_host_work() -> None:
    table = CostTable({1: {1: 2.0, 9: 4.0}}, {"small": {1: (0.3, 0.1)}}, trees={1: 0.1, 4: 0.4})
    assert round_ms(table, [("small", 2, 1)]) == pytest.approx(0.4 + 2.0 + 0.25 * 3 + 0.1)
    assert [table.tree(batch) for batch in (1, 2, 4)] == pytest.approx([0.1, 0.2, 0.4])
    assert CostTable({1: {1: 2.0}}, {}).tree(3) == 0.0


def test_reading_costs_as_measured_or_as_a_pass_of_the_target() -> None:
    passes, drafts = {1: {1: 2.0, 5: 4.0}}, {"small": {1: (0.3, 0.2)}}
    assert CostTable(passes, drafts).read("small", 5) == pytest.approx(0.3 * 4.0 / 2.0)
    assert CostTable(passes, drafts, {"small": 0.01}).read("small", 5) == pytest.approx(0.3 + 4 * 0.01)
    assert CostTable(passes, drafts).read("small", 1) == 0.0, "the first draft step reads one token"
    assert CostTable.unmeasured().read("small", 64) == 0.25, "columns are free where none was measured"
    noisy = {1: {1: 2.0, 4: 2.0, 5: 4.0}}
    assert CostTable(noisy, drafts).read("small", 9) == pytest.approx(0.3 * 6.0 / 2.0), "not by its last line"


def test_acceptance_is_estimated_as_its_equations_say() -> None:
    pooled = AcceptanceEstimate(3, assumed=0.6)
    own = AcceptanceEstimate(3, pooled)
    assert pooled.survival(3) == own.survival(3) == pytest.approx((0.6, 0.36, 0.216))
    for drafted, accepted in ((3, 1), (3, 3), (0, 0)):  # the drafter had nothing to propose in the last round
        pooled.learn(Round(drafted, accepted, accepted + 1))
        own.learn(Round(drafted, accepted, accepted + 1))
    f, g = 0.98, 0.9
    alpha = (f**2 + 3 * f + 8 * 0.6) / ((f**2 + f + 1) + (f**2 + f) + f + 8)
    rates = [
        (f**2 + f + 8 * alpha) / (f**2 + f + 1 + 8),
        (f + 8 * alpha) / (f**2 + f + 8),
        (f + 8 * alpha) / (f + 8),
    ]
    assert pooled.alpha == pytest.approx(alpha)
    assert pooled.rates(3) == pytest.approx(rates)
    own_alpha = (g**2 + 3 * g + 8 * alpha) / ((g**2 + g + 1) + (g**2 + g) + g + 8)
    level = own_alpha / alpha
    first = (g**2 + g + 8 * level * rates[0]) / (g**2 + g + 1 + 8)
    second = (g + 8 * level * rates[1]) / (g**2 + g + 8)
    assert own.survival(2) == pytest.approx((first, first * second))
    assert not pooled.known
    for _ in range(8):
        pooled.learn(Round(1, 1, 2))
    assert pooled.known


def rate(table: CostTable, rows: list[Candidate | None], shapes: Sequence[TreeShape]) -> float:
    pairs = list(zip(rows, shapes, strict=True))
    tokens = len(rows) + sum(
        sum(row.survival[: shape.budget]) + sum(row.gains[: shape.siblings])
        for row, shape in pairs
        if row is not None
    )
    return tokens / round_ms(table, [(row and row.drafter, *shape) for row, shape in pairs])


def drawn_batch(dice: random.Random) -> tuple[CostTable, list[Candidate | None], list[list[TreeShape]]]:
    """Return costs, up to three rows, and the drafts that each may have; lookup's steps cost nothing."""
    rows: list[Candidate | None] = []
    for _ in range(dice.randint(1, 3)):
        rates = [dice.choice([0.2, 0.6, 0.9, 1.0]) for _ in range(dice.randint(1, 4))]
        candidate = Candidate(
            dice.choice(["small", "other", "lookup"]),
            tuple(itertools.accumulate(rates, float.__mul__)),
            dice.choice([0.0, 0.3, 0.9]),
        )
        rows.append(candidate if dice.random() < 0.9 else None)
    batch = len(rows)
    widths, times = sorted(dice.sample(range(batch + 1, 16), 3)), sorted(dice.uniform(1, 2) for _ in range(4))
    steps = {name: {batch: (dice.uniform(0.05, 0.6), dice.uniform(0.05, 0.3))} for name in ("small", "other")}
    passes = {batch: dict(zip([batch, *widths], times, strict=True))}
    trees = {batch: dice.choice([0.0, 0.02])}
    table = CostTable(passes, steps | {"lookup": {batch: (0.0, 0.0)}}, trees=trees)
    return table, rows, [shapes_of(row) for row in rows]


def shapes_of(row: Candidate | None) -> list[TreeShape]:
    if row is None:
        return [TreeShape(0)]
    return [TreeShape(k, m) for k in range(len(row.survival) + 1) for m in range(k + 1 if row.sibling else 1)]


@pytest.mark.parametrize("seed", range(40))
def test_no_budgets_are_better_than_the_best(seed: int) -> None:
    dice = random.Random(seed)
    table, rows, shapes = drawn_batch(dice)
    found = best_budgets(table, rows)
    best = max(rate(table, rows, each) for each in itertools.product(*shapes))
    assert rate(table, rows, found) == pytest.approx(best, rel=1e-12)
    if len(rows) == 1 and rows[0] is not None:
        assert best_length(table, 1, rows[0]) == (pytest.approx(best), found[0])
    # beside rows that are decided
    standing = [dice.choice(each) for each in shapes[1:]]
    decided: list[Any] = []
    for row, shape in zip(rows[1:], standing, strict=True):
        decision = Decision(row and row.drafter, shape.budget, None, shape.siblings)
        limits = {row.drafter: shape.budget} if row else {}
        decided.append((SimpleNamespace(limits=limits), HeldDecision(decision, candidate=row)))
    found = best_budgets(table, rows[:1], _together(decided))
    best = max(rate(table, rows, [each, *standing]) for each in shapes[0])
    assert rate(table, rows, [*found, *standing]) == pytest.approx(best, rel=1e-12)


def test_a_bad_row_among_good_ones_gets_no_draft() -> None:
    good, bad = Candidate("small", (0.8, 0.64, 0.5)), Candidate("small", (0.05, 0.0, 0.0))
    budgets = best_budgets(flat(), [bad, *[good] * 7])
    assert budgets[0].budget == 0 and min(budgets[1:]).budget > 1


def test_a_free_proposal_that_does_not_pay_for_its_columns_is_left_out() -> None:
    table = CostTable({1: {1: 1.0, 2: 2.0}}, {"lookup": {1: (0.0, 0.0)}})
    assert best_budgets(table, [Candidate("lookup", (0.5,))]) == [TreeShape(0)]
