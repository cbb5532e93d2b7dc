"""Acceptance statistics: how likely the next drafted tokens survive, from what became of earlier drafts."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from foredraft.decode.stats import Round

__all__ = ["Acceptance"]

PRIOR_ALPHA = 0.7  # acceptance of a drafter without history: typical of published draft models
PRIOR_ROUNDS = 8.0  # rounds that a prior weighs as much as: few enough that a text that differs shows
# Share of rejected tokens whose sibling stands: of most replays the least (benchmarks/notes/trees.md).
PRIOR_SIBLING = 0.4
REQUEST_FADE = 0.9  # weight of a request's round after the next one: it remembers about 10 rounds
POOL_FADE = 0.98  # the same of all requests together: about 50 rounds


class Acceptance:
    """Running estimate of one drafter's acceptance by draft position, in one request or pooled over all.

    tried_j counts drafts that reached position j, kept_j those whose token there was accepted; a round fades
    both. Estimates shrink towards the prior's, which knows more requests (r', alpha'), or a constant:

        alpha = (sum_j kept_j + w alpha') / (sum_j tried_j + w)
        r_j   = (kept_j + w r'_j alpha / alpha') / (tried_j + w)
        s_j   = r_1 ... r_j,  P(the first j drafted tokens are all accepted)
        h     = (written + w h') / (met + w),  P(a sibling is written | the token beside it is rejected)

    `met` counts rejected tokens that had a sibling. It fades in every round, so that siblings that did not
    pay are tried again.

    Args:
        length: Longest draft.
        prior: The pooled estimate; None makes this one the pooled estimate.
        assumed: alpha' = r'_j of a pooled estimate.
    """

    def __init__(self, length: int, prior: Acceptance | None = None, assumed: float = PRIOR_ALPHA) -> None:
        self.prior, self.assumed = prior, assumed
        self.tried, self.kept = [0.0] * length, [0.0] * length
        self.met = self.written = 0.0

    @property
    def known(self) -> bool:
        """Return whether the estimate rests on more than its prior."""
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
        """Return r_1 ... r_length."""
        alpha = self.alpha
        if self.prior is None:
            expected = [alpha] * length
        else:
            level = alpha / self.prior.alpha
            expected = [min(1.0, level * rate) for rate in self.prior.rates(length)]
        counts = zip(self.kept, self.tried, expected, strict=False)
        return [(kept + PRIOR_ROUNDS * rate) / (tried + PRIOR_ROUNDS) for kept, tried, rate in counts]

    def survival(self, length: int) -> tuple[float, ...]:
        """Return s_1 ... s_length."""
        return tuple(accumulate(self.rates(length), mul))
