"""Draft lengths of a batch: pure functions of costs and acceptance.

A round of B rows that drafts k_b tokens for row b emits sum_b (1 + sum_{j <= k_b} s_b(j)) tokens on average,
where s_b(j) = P(the first j drafted tokens of row b are all accepted). It costs v(B + sum_b k_b) + sum_d
c_d(max of k_b over the rows of drafter d). The best lengths maximise the quotient (Leviathan et al. 2023,
arXiv 2211.17192, section 3, for a batch and for costs that depend on the length).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import product
from typing import NamedTuple

import numpy as np

from foredraft.decode.policy.cost_table import Costs

__all__ = ["Prospect", "best_budgets", "best_length"]


class Prospect(NamedTuple):
    """The expected acceptance of one row's drafts by a drafter."""

    drafter: str
    survival: tuple[float, ...]  # s(1), s(2), ... as far as the row may draft; never rising


def best_length(table: Costs, batch: int, prospect: Prospect) -> tuple[float, int]:
    """Return (tokens per ms, draft length) at the best length of a batch in which every row drafts alike."""
    tokens, best, length = 1.0, batch / table.plain(batch), 0
    for k, survival in enumerate(prospect.survival, start=1):
        tokens += survival
        ms = table.draft(prospect.drafter, batch, k) + table.verify(batch, batch * (1 + k))
        if (rate := batch * tokens / ms) > best:
            best, length = rate, k
    return best, length


def best_budgets(table: Costs, rows: Seq[Prospect | None]) -> list[int]:
    """Return the draft length of every row, so that together they give the most tokens per ms.

    For given depths of the drafters, rows compete for columns alone, and the likeliest tokens win. (They are
    prefixes of drafts, because s never rises along a row.) So only the depths have to be enumerated. A
    drafter whose steps cost nothing may always go to its full depth.
    """
    if len(rows) == 1:  # the same lengths, without arrays
        return [0 if row is None else best_length(table, 1, row)[1] for row in rows]
    batch, deepest = len(rows), dict[str, int]()
    for row in rows:
        if row is not None:
            deepest[row.drafter] = max(deepest.get(row.drafter, 0), len(row.survival))
    tokens = [
        (-survival, depth, at, row.drafter)
        for at, row in enumerate(rows)
        if row is not None
        for depth, survival in enumerate(row.survival, start=1)
    ]
    if not tokens:
        return [0] * batch
    tokens.sort()
    survival = -np.array([token[0] for token in tokens])
    depth, owner = (np.array([token[field] for token in tokens]) for field in (1, 2))
    places = {drafter: place for place, drafter in enumerate(deepest)}
    drafter = np.array([places[token[3]] for token in tokens])
    ranges = [range(most + 1) if table.draft(name, batch, 1) else (most,) for name, most in deepest.items()]
    depths = np.array(list(product(*ranges)))  # [C, drafters]
    drafting = [
        sum(table.draft(name, batch, steps) for name, steps in zip(deepest, each, strict=True))
        for each in depths.tolist()
    ]
    passes = np.array([table.verify(batch, batch + drafted) for drafted in range(len(tokens) + 1)])
    taken = depth <= depths[:, drafter]  # [C, tokens]
    emitted = batch + (survival * taken).cumsum(1)
    rates = emitted / (np.array(drafting)[:, None] + passes[taken.cumsum(1)])
    choice, last = np.unravel_index(rates.argmax(), rates.shape)
    if rates[choice, last] <= batch / passes[0]:
        return [0] * batch
    owners = owner[: last + 1][taken[choice, : last + 1]]
    return [int(count) for count in np.bincount(owners, minlength=batch)]
