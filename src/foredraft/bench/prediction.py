"""What costs make of drafts: the speed-up to expect, and the best that there is. Pure: no clock, no model.

S = tau / (k c + v(k + 1)) with tau tokens and k drafted ones a round: theorem 3.8 of Leviathan et al. 2023,
arXiv:2211.17192, but for a verifying pass that may cost more than a plain step. No host work is counted.
"""

from __future__ import annotations

from itertools import pairwise

from foredraft.bench.records import Ceiling, Costs

__all__ = ["accepted_length", "ceiling", "predicted", "round_cost", "verifying"]


def accepted_length(alpha: float, length: int) -> float:
    """tau of drafts of `length` tokens, each of which is accepted with probability alpha if all before it
    were: (1 - alpha^(length + 1)) / (1 - alpha), and length + 1 where alpha is 1."""
    return sum(alpha**accepted for accepted in range(length + 1))


def verifying(costs: Costs, rows: float) -> float:
    """v; between two row counts that were measured it lies on the line between theirs. rows: from 1 to the
    most that were."""
    known = [(cost.rows, cost.v) for cost in costs.verifying]
    assert 1 <= rows <= known[-1][0]
    for (below, cheap), (above, dear) in pairwise(known):
        if rows <= above:
            return cheap + (dear - cheap) * (rows - below) / (above - below)
    return known[0][1]  # a single row, and no other was measured


def round_cost(costs: Costs, drafter: str | None, length: float) -> float:
    """k c + v(k + 1) at a mean draft length k."""
    drafting = length * costs.drafting[drafter] if drafter is not None else 0.0
    return verifying(costs, length + 1) + drafting


def predicted(costs: Costs, drafter: str | None, length: float, tau: float) -> float:
    """S = tau / (k c + v(k + 1)): the speed-up if nothing but forwards took time."""
    return tau / round_cost(costs, drafter, length)


def ceiling(costs: Costs, drafter: str, alpha: float) -> Ceiling:
    """The largest S of drafts of one length, of all from one token to the widest pass that was measured."""
    lengths = range(1, costs.verifying[-1].rows)
    found = [(predicted(costs, drafter, k, accepted_length(alpha, k)), k) for k in lengths]
    speedup, length = max(found, key=lambda pair: pair[0])
    return Ceiling(alpha, length, speedup)
