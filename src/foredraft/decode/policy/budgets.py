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

import numpy as np

from foredraft.decode.policy.costs import CostTable
from foredraft.decode.policy.protocol import Choice

__all__ = ["Prospect", "best_budgets", "best_length", "round_ms"]


@dataclass(frozen=True, slots=True)
class Prospect:
    """Who would draft for a row; survives: s(1), s(2), ... as far as it may draft, never rising."""

    drafter: str
    survives: tuple[float, ...]


def round_ms(table: CostTable, choices: Seq[Choice]) -> float:
    """Of a round in which the rows draft so; reading left out."""
    depths: dict[str, int] = {}
    for drafter, budget, _ in choices:
        if drafter is not None and budget:
            depths[drafter] = max(depths.get(drafter, 0), budget)
    batch = len(choices)
    drafting = sum(table.drafting(drafter, batch, depth) for drafter, depth in depths.items())
    return drafting + table.verifying(batch, batch + sum(choice.budget for choice in choices))


def best_length(table: CostTable, batch: int, prospect: Prospect) -> tuple[float, int]:
    """Of one row, which takes its share of a batch that drafts as it does: tokens per ms at the best draft
    length, and that."""
    tokens, best, longest = 1.0, batch / table.verifying(batch, batch), 0
    rounds = table.rounds(prospect.drafter, batch, len(prospect.survives))
    for length, (survives, ms) in enumerate(zip(prospect.survives, rounds, strict=True), start=1):
        tokens += survives
        if (rate := batch * tokens / ms) > best:
            best, longest = rate, length
    return best, longest


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
    lengths = [0 if row is None else len(row.survives) for row in rows]
    if not any(lengths):
        return [0] * batch
    chances = np.full((max(lengths), batch), -1.0)  # [depths, B]: s, where there is a token
    for at, row in enumerate(rows):
        if row is not None:
            chances[: lengths[at], at] = row.survives
    order = np.argsort(-chances, axis=None, kind="stable")[: sum(lengths)]  # the shallower first
    survives, (depths, owners) = chances.ravel()[order], np.divmod(order, batch)
    places = {drafter: place for place, drafter in enumerate(deepest)}
    by = np.array([-1 if row is None else places[row.drafter] for row in rows])[owners]  # who drafts it
    tried = np.array(list(product(*ranges)))  # [C, drafters]
    drafting = [
        sum(table.drafting(drafter, batch, depth) for drafter, depth in zip(deepest, each, strict=True))
        for each in tried.tolist()
    ]
    fits = depths < tried[:, by]  # [C, tokens]
    passes = table.passing(batch, len(order))
    rates = (batch + (survives * fits).cumsum(1)) / (np.array(drafting)[:, None] + passes[fits.cumsum(1)])
    choice, last = np.unravel_index(rates.argmax(), rates.shape)
    if rates[choice, last] <= batch / passes[0]:
        return [0] * batch
    taken = owners[: last + 1][fits[choice, : last + 1]]
    return [int(count) for count in np.bincount(taken, minlength=batch)]
