"""What costs make of drafts: the speed-up to expect, and the best that there is. Pure: no clock, no model.

S = tau / (c_1 + ... + c_s + v(k + 1)) with tau tokens, k drafted ones and s steps of the drafter's a round:
theorem 3.8 of Leviathan et al. 2023, arXiv:2211.17192, but for a verifying pass that may cost more than a
plain step, a first draft step that may cost more than others, and drafts of several lengths. No host work is
counted.
"""

from __future__ import annotations

from itertools import pairwise

from foredraft.bench.records import Ceiling, Costs
from foredraft.decode.stats import Stats

__all__ = ["accepted_length", "ceiling", "forwards_cost", "predicted", "verifying"]


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


def forwards_cost(costs: Costs, stats: Stats) -> float:
    """Of a round's forwards, the mean over all rounds, whoever drafted in them."""
    steps = stats.steps
    drafting = sum(costs.drafting[name].of(steps[name], drafts) for name, drafts in stats.drafts.items())
    passes = sum(count * verifying(costs, 1 + drafted) for drafted, count in enumerate(stats.lengths))
    return (drafting + passes) / stats.rounds


def predicted(costs: Costs, stats: Stats) -> float:
    """S: the speed-up if nothing but forwards took time."""
    return stats.tokens / stats.rounds / forwards_cost(costs, stats)


def ceiling(costs: Costs, drafter: str, alpha: float) -> Ceiling:
    """The largest S of drafts of one length, of all from one token to the widest pass that was measured."""
    lengths = range(1, costs.verifying[-1].rows)
    found = [
        (accepted_length(alpha, k) / (costs.drafting[drafter].of(k) + verifying(costs, k + 1)), k)
        for k in lengths
    ]
    speedup, length = max(found, key=lambda pair: pair[0])
    return Ceiling(alpha, length, speedup)
