"""How much every row of a batch should draft: pure functions of costs and of how likely drafts survive.

A round of B rows that drafts k_b tokens for row b gives sum_b (1 + sum_{j <= k_b} s_b(j)) tokens on average,
s_b(j) = P(the first j drafted tokens of row b are all accepted), and takes v(B + sum_b k_b) + sum_d c_d(max
of k_b over the rows of drafter d). Budgets are best where the quotient of the two is largest. One more token
pays as long as its s_b(j) is more than what its column and its step take at that rate.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product

from foredraft.decode.policy.costs import CostTable

__all__ = ["Prospect", "best_budgets", "best_length", "round_ms"]


@dataclass(frozen=True, slots=True)
class Prospect:
    """Who would draft for a row; survives: s(1), s(2), ... as far as it may draft, never rising."""

    drafter: str
    survives: tuple[float, ...]


def round_ms(table: CostTable, choices: Seq[tuple[str | None, int]]) -> float:
    """Of a round in which these draft so many tokens, a pair for each row."""
    depths: dict[str, int] = {}
    for drafter, budget in choices:
        if drafter is not None and budget:
            depths[drafter] = max(depths.get(drafter, 0), budget)
    batch = len(choices)
    drafting = sum(table.drafting(drafter, batch, depth) for drafter, depth in depths.items())
    return drafting + table.verifying(batch, batch + sum(budget for _, budget in choices))


def best_length(table: CostTable, batch: int, prospect: Prospect) -> tuple[float, int]:
    """Of one row, which takes its share of a batch that drafts as it does: tokens per ms at the best draft
    length, and that."""
    tokens, best = 1.0, (batch / table.verifying(batch, batch), 0)
    for length, survives in enumerate(prospect.survives, start=1):
        tokens += survives
        ms = table.drafting(prospect.drafter, batch, length) + table.verifying(batch, batch * (1 + length))
        best = max(best, (batch * tokens / ms, length), key=lambda pair: pair[0])
    return best


def best_budgets(table: CostTable, rows: Seq[Prospect | None]) -> list[int]:
    """The budgets of the largest rate.

    For given depths of the drafters, rows compete for columns alone, and the likeliest tokens win: s never
    rises along a row, so that they are prefixes. So only depths have to be tried. A drafter that takes no
    time may always go to its full depth.
    """
    batch = len(rows)
    deepest: dict[str, int] = {}
    for row in rows:
        if row is not None:
            deepest[row.drafter] = max(deepest.get(row.drafter, 0), len(row.survives))
    ranges = [
        range(deep + 1) if table.drafting(drafter, batch, 1) > 0 else (deep,)
        for drafter, deep in deepest.items()
    ]
    tokens = sorted(
        (-survives, depth, at)
        for at, row in enumerate(rows)
        if row is not None
        for depth, survives in enumerate(row.survives, start=1)
    )
    best, chosen = batch / table.verifying(batch, batch), [0] * batch
    for depths in product(*ranges):
        most = dict(zip(deepest, depths, strict=True))
        drafting = sum(table.drafting(drafter, batch, depth) for drafter, depth in most.items())
        gained, columns, budgets = float(batch), batch, [0] * batch
        for negative, depth, at in tokens:
            row = rows[at]
            assert row is not None
            if depth > most[row.drafter]:
                continue
            gained, columns = gained - negative, columns + 1
            budgets[at] = depth
            rate = gained / (drafting + table.verifying(batch, columns))
            if rate > best:
                best, chosen = rate, list(budgets)
    return chosen
