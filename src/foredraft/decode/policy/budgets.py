"""Draft lengths and siblings of a batch: pure functions of costs and acceptance.

A round of B rows that drafts k_b tokens for row b emits sum_b (1 + sum_{j <= k_b} s_b(j)) tokens on average,
where s_b(j) = P(the first j drafted tokens of row b are all accepted). It costs v(B + sum_b k_b) + sum_d
c_d(max of k_b over the rows of drafter d). The best lengths maximise the quotient (Leviathan et al. 2023,
arXiv 2211.17192, section 3, for a batch and for costs that depend on the length).

A sibling of the j-th drafted token is written, and one token more comes, where that token is the first to be
rejected and the sibling stands: with probability (s(j - 1) - s(j)) h. It costs one column and no draft step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from foredraft.decode.policy.cost_table import Costs

__all__ = ["Others", "Prospect", "Shape", "best_budgets", "best_length"]


class Shape(NamedTuple):
    """A draft: its tokens, and the siblings of the first of them, at most one each."""

    budget: int
    siblings: int = 0


class Prospect(NamedTuple):
    """The expected acceptance of one row's drafts by a drafter."""

    drafter: str
    survival: tuple[float, ...]  # s(1), s(2), ... as far as the row may draft; never rising
    sibling: float = 0.0  # h = P(a sibling is written | the token beside it is rejected); 0: none may be

    def tokens(self, shape: Shape) -> float:
        """Return the tokens that a draft emits on average, beside the target's own."""
        return sum(self.survival[: shape.budget]) + sum(self.gains[: shape.siblings])

    @property
    def gains(self) -> list[float]:
        """Return the tokens that a sibling of each drafted token adds; as bounds that never rise."""
        if not self.sibling:
            return []
        least, before, gains = 1.0, 1.0, list[float]()
        for survival in self.survival:
            least = min(least, (before - survival) * self.sibling, survival)
            gains.append(least)
            before = survival
        return gains


def best_length(table: Costs, batch: int, prospect: Prospect) -> tuple[float, Shape]:
    """Return (tokens per ms, draft) at the best draft of a batch in which every row drafts alike."""
    longest, gains, comb = len(prospect.survival), prospect.gains, table.comb(batch)
    drafting = table.drafts_up_to(prospect.drafter, batch, longest)
    passes = [table.verify(batch, batch * width) for width in range(1, 2 + longest + len(gains))]
    tokens, best, shape = 1.0, 1 / passes[0], Shape(0)
    for k, survival in enumerate(prospect.survival, start=1):
        tokens += survival
        emitted, ms = tokens, drafting[k - 1]
        if emitted > best * (ms + passes[k]):
            best, shape = emitted / (ms + passes[k]), Shape(k)
        ms += comb
        for siblings, gain in enumerate(gains[:k], start=1):
            emitted += gain
            if emitted > best * (ms + passes[k + siblings]):
                best, shape = emitted / (ms + passes[k + siblings]), Shape(k, siblings)
    return batch * best, shape


class Others(NamedTuple):
    """The rows of a batch whose drafts are decided, together.

    Attributes:
        rows: How many.
        tokens: That their drafts emit on average, beside one a row.
        columns: Of their drafted tokens and siblings.
        depths: Their longest draft by drafter.
        siblings: Some have siblings.
    """

    rows: int = 0
    tokens: float = 0.0
    columns: int = 0
    depths: Mapping[str, int] = MappingProxyType({})
    siblings: bool = False


NONE = Others()


def best_budgets(table: Costs, rows: Seq[Prospect | None], others: Others = NONE) -> list[Shape]:
    """Return the draft of every row, so that with the others' they give the most tokens per ms.

    For given depths of the drafters, rows compete for columns alone, and the likeliest tokens win, siblings
    among them. (They are prefixes of drafts, because s and gains never rise along a row.) So only the depths
    have to be enumerated. A drafter whose steps cost nothing may always go to its full depth.
    """
    batch, deepest = len(rows) + others.rows, dict.fromkeys(others.depths, 0)
    if batch == 1:  # the same drafts, without arrays
        return [Shape(0) if row is None else best_length(table, 1, row)[1] for row in rows]
    for row in rows:
        if row is not None:
            deepest[row.drafter] = max(deepest.get(row.drafter, 0), len(row.survival))
    # (less what it emits, depth, whether it is a sibling, row, drafter): a draft's token before its sibling
    tokens = [
        (-chance, depth, beside, at, row.drafter)
        for at, row in enumerate(rows)
        if row is not None
        for beside, chances in enumerate((row.survival, row.gains))
        for depth, chance in enumerate(chances, start=1)
    ]
    if not tokens:
        return [Shape(0)] * len(rows)
    tokens.sort()
    chance = -np.array([token[0] for token in tokens])
    depth, beside, owner = (np.array([token[field] for token in tokens]) for field in (1, 2, 3))
    places = {drafter: place for place, drafter in enumerate(deepest)}
    drafter = np.array([places[token[4]] for token in tokens])
    ms = {
        name: [0.0, *table.drafts_up_to(name, batch, max(most, others.depths.get(name, 0)))]
        for name, most in deepest.items()
    }  # by drafter and steps
    ranges = [range(most + 1) if any(ms[name]) else (most,) for name, most in deepest.items()]
    depths = np.array(list(product(*ranges)))  # [C, drafters]; the first drafts as the others do
    drafting = [
        sum(
            ms[name][max(steps, others.depths.get(name, 0))]
            for name, steps in zip(deepest, each, strict=True)
        )
        for each in depths.tolist()
    ]
    columns, comb = batch + others.columns, table.comb(batch)
    passes = np.array([table.verify(batch, columns + more) for more in range(len(tokens) + 1)])
    taken = depth <= depths[:, drafter]  # [C, tokens]
    emitted = batch + others.tokens + (chance * taken).cumsum(1)
    combs = comb * (np.logical_or.accumulate(taken & (beside == 1), 1) | others.siblings)
    rates = emitted / (np.array(drafting)[:, None] + passes[taken.cumsum(1)] + combs)
    choice, last = np.unravel_index(rates.argmax(), rates.shape)
    kept_ms = drafting[0] + passes[0] + comb * others.siblings
    if rates[choice, last] <= (batch + others.tokens) / kept_ms:
        return [Shape(0)] * len(rows)
    found = taken[choice, : last + 1]
    budgets, siblings = (
        np.bincount(owner[: last + 1][found & (beside[: last + 1] == kind)], minlength=len(rows)).tolist()
        for kind in (0, 1)
    )
    return [Shape(*pair) for pair in zip(budgets, siblings, strict=True)]
