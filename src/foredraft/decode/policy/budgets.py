"""Draft lengths and siblings of a batch, by costs and by how likely the next drafted tokens survive.

A round of B rows that drafts k_b tokens for row b emits sum_b (1 + sum_{j <= k_b} s_b(j)) tokens on average,
where s_b(j) = P(the first j drafted tokens of row b are all accepted). It costs v(B + sum_b k_b) + sum_d
c_d(max of k_b over the rows of drafter d). The best lengths maximise the quotient (Leviathan et al. 2023,
arXiv 2211.17192, section 3). In a token tree, a sibling of the j-th drafted token adds one token with
probability (s(j - 1) - s(j)) h, for one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.decode.policy.cost_table import Costs
from foredraft.decode.stats import Round

PRIOR_ALPHA = 0.7  # acceptance of a drafter without history: typical of published draft models
PRIOR_ROUNDS = 8.0  # rounds that a prior weighs as much as: few enough that a text that differs shows
# Share of rejected tokens whose sibling stands: of most replays the least (benchmarks/notes/trees.md).
PRIOR_SIBLING = 0.4
REQUEST_FADE = 0.9  # weight of a request's round after the next one: it remembers about 10 rounds
POOL_FADE = 0.98  # the same of all requests together: about 50 rounds


class AcceptanceEstimate:
    """Running estimate of one drafter's acceptance by draft position, in one request or pooled over all.

    tried_j counts drafts that reached position j, kept_j those whose token there was accepted; a round fades
    both. Estimates shrink towards the prior's, which knows more requests (r', alpha'), or a constant:

        alpha = (sum_j kept_j + w alpha') / (sum_j tried_j + w)
        r_j   = (kept_j + w r'_j alpha / alpha') / (tried_j + w)
        s_j   = r_1 ... r_j,  P(the first j drafted tokens are all accepted)
        h     = (written + w h') / (met + w),  P(a sibling is written | the token beside it is rejected)

    `met` counts rejected tokens that had a sibling. It fades in every round, so that siblings that did not
    pay are tried again.
    """

    def __init__(
        self, length: int, prior: AcceptanceEstimate | None = None, assumed: float = PRIOR_ALPHA
    ) -> None:
        self.prior, self.assumed = prior, assumed
        self.tried, self.kept = [0.0] * length, [0.0] * length
        self.met = self.written = 0.0

    @property
    def known(self) -> bool:
        return self.tried[0] >= PRIOR_ROUNDS

    @property
    def alpha(self) -> float:
        """Return P(a drafted token is accepted | all before it in its draft were)."""
        assumed = self.assumed if self.prior is None else self.prior.alpha
        return (sum(self.kept) + PRIOR_ROUNDS * assumed) / (sum(self.tried) + PRIOR_ROUNDS)

    def learn(self, outcome: Round) -> None:
        """Count one round; a drafter that proposed nothing counts like one rejected token."""
        fade, drafted = POOL_FADE if self.prior is None else REQUEST_FADE, max(outcome.drafted, 1)
        self.tried = [fade * x for x in self.tried]
        self.kept = [fade * x for x in self.kept]
        for position in range(min(outcome.accepted + 1, drafted, len(self.tried))):
            self.tried[position] += 1
            self.kept[position] += position < outcome.accepted
        self.met, self.written = fade * self.met, fade * self.written
        if outcome.accepted < min(outcome.drafted, outcome.siblings):
            self.met += 1
            self.written += outcome.sibling

    @property
    def sibling(self) -> float:
        """Return P(a sibling is written | the token beside it is rejected)."""
        prior = PRIOR_SIBLING if self.prior is None else self.prior.sibling
        return (self.written + PRIOR_ROUNDS * prior) / (self.met + PRIOR_ROUNDS)

    def rates(self, length: int) -> list[float]:
        alpha = self.alpha
        if self.prior is None:
            expected = [alpha] * length
        else:
            level = alpha / self.prior.alpha
            expected = [min(1.0, level * rate) for rate in self.prior.rates(length)]
        counts = zip(self.kept, self.tried, expected, strict=False)
        return [(kept + PRIOR_ROUNDS * rate) / (tried + PRIOR_ROUNDS) for kept, tried, rate in counts]

    def survival(self, length: int) -> tuple[float, ...]:
        return tuple(accumulate(self.rates(length), mul))


class TreeShape(NamedTuple):
    """A token tree: a chain of drafted tokens, and siblings of the first of them, at most one each."""

    budget: int
    siblings: int = 0


class Candidate(NamedTuple):
    """The expected acceptance of one row's drafts by a drafter."""

    drafter: str
    survival: tuple[float, ...]  # s(1), s(2), ... as far as the row may draft; never rising
    sibling: float = 0.0  # h = P(a sibling is written | the token beside it is rejected); 0: none may be

    def tokens(self, shape: TreeShape) -> float:
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


def best_length(table: Costs, batch: int, candidate: Candidate) -> tuple[float, TreeShape]:
    """Return (tokens per ms, draft) at the best draft of a batch in which every row drafts alike."""
    longest, gains, tree_ms = len(candidate.survival), candidate.gains, table.tree(batch)
    drafting = table.drafts_up_to(candidate.drafter, batch, longest)
    passes = [table.verify(batch, batch * width) for width in range(1, 2 + longest + len(gains))]
    tokens, best, shape = 1.0, 1 / passes[0], TreeShape(0)
    for k, survival in enumerate(candidate.survival, start=1):
        tokens += survival
        emitted, ms = tokens, drafting[k - 1]
        if emitted > best * (ms + passes[k]):
            best, shape = emitted / (ms + passes[k]), TreeShape(k)
        ms += tree_ms
        for siblings, gain in enumerate(gains[:k], start=1):
            emitted += gain
            if emitted > best * (ms + passes[k + siblings]):
                best, shape = emitted / (ms + passes[k + siblings]), TreeShape(k, siblings)
    return batch * best, shape


class Others(NamedTuple):
    """The rows of a batch whose drafts are decided, together."""

    rows: int = 0  # how many
    tokens: float = 0.0  # that their drafts emit on average, beside one a row
    columns: int = 0  # of their drafted tokens and siblings
    depths: Mapping[str, int] = MappingProxyType({})  # their longest draft by drafter
    siblings: bool = False  # some have siblings


NONE = Others()


def best_budgets(table: Costs, rows: Seq[Candidate | None], others: Others = NONE) -> list[TreeShape]:
    """Return the draft of every row, so that with the others' they give the most tokens per ms.

    For given depths of the drafters the likeliest tokens win, siblings among them, as s and gains never rise
    along a row. So only depths are enumerated.
    """
    batch, deepest = len(rows) + others.rows, dict.fromkeys(others.depths, 0)
    if batch == 1:  # the same drafts, without arrays
        return [TreeShape(0) if row is None else best_length(table, 1, row)[1] for row in rows]
    for row in rows:
        if row is not None:
            deepest[row.drafter] = max(deepest.get(row.drafter, 0), len(row.survival))
    places = {name: place for place, name in enumerate(deepest)}
    # (less what it emits, depth, whether it is a sibling, row, drafter): a draft's token before its sibling
    tokens = [
        (-chance, depth, sibling, at, places[row.drafter])
        for at, row in enumerate(rows)
        if row is not None
        for sibling, chances in enumerate((row.survival, row.gains))
        for depth, chance in enumerate(chances, start=1)
    ]
    if not tokens:
        return [TreeShape(0)] * len(rows)
    tokens.sort()
    chance = -np.array([token[0] for token in tokens])
    depth, sibling, owner, drafter = (np.array([token[field] for token in tokens]) for field in range(1, 5))
    depths, drafting = _drafting(table, batch, deepest, others)
    columns, tree_ms = batch + others.columns, table.tree(batch)
    passes = np.array([table.verify(batch, columns + more) for more in range(len(tokens) + 1)])
    taken = depth <= depths[:, drafter]  # [C, tokens]
    emitted = batch + others.tokens + (chance * taken).cumsum(1)
    added = tree_ms * (np.logical_or.accumulate(taken & (sibling == 1), 1) | others.siblings)
    rates = emitted / (drafting[:, None] + passes[taken.cumsum(1)] + added)
    choice, last = np.unravel_index(rates.argmax(), rates.shape)
    kept_ms = drafting[0] + passes[0] + tree_ms * others.siblings
    if rates[choice, last] <= (batch + others.tokens) / kept_ms:
        return [TreeShape(0)] * len(rows)
    found = taken[choice, : last + 1]
    budgets, siblings = (
        np.bincount(owner[: last + 1][found & (sibling[: last + 1] == kind)], minlength=len(rows)).tolist()
        for kind in (0, 1)
    )
    return [TreeShape(*pair) for pair in zip(budgets, siblings, strict=True)]


def _drafting(
    table: Costs, batch: int, deepest: Mapping[str, int], others: Others
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return depths of the drafters [C, drafters], and the ms of their steps [C]; first as the others do."""
    ms = {
        name: [0.0, *table.drafts_up_to(name, batch, max(most, others.depths.get(name, 0)))]
        for name, most in deepest.items()
    }  # by drafter and steps
    depths = list(product(*(range(most + 1) if any(ms[name]) else (most,) for name, most in deepest.items())))
    pairs = ([*zip(deepest, each, strict=True)] for each in depths)
    drafting = [sum(ms[name][max(n, others.depths.get(name, 0))] for name, n in each) for each in pairs]
    return np.array(depths), np.array(drafting)
