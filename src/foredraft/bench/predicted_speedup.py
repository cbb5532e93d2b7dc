"""Predictions from costs: the expected speed-up of a run, and the ceiling of a drafter. Pure functions.

S = tau / (c_1 + ... + c_s + v(k + 1)), with tau tokens, k drafted tokens, siblings among them, and s drafter
steps per round. This is theorem 3.8 of Leviathan et al. 2023 (arXiv:2211.17192), with three differences: a
verifying pass may cost more than a plain step, a draft's first step may cost more than its other steps, and
draft lengths may vary. Host work is not counted.
"""

from __future__ import annotations

from foredraft.bench.bench_records import Ceiling, ForwardCosts
from foredraft.decode.policy.cost_table import on_line
from foredraft.decode.stats import Stats

__all__ = ["ceiling", "forward_cost", "mean_accepted_length", "predicted_speedup", "verifying_cost"]


def mean_accepted_length(alpha: float, length: int) -> float:
    """Return tau of drafts of `length` tokens: (1 - alpha^(length + 1)) / (1 - alpha).

    Args:
        alpha: Probability that a drafted token is accepted, given that all before it in its draft were.
        length: Draft length, in tokens. At alpha 1, tau is length + 1.
    """
    return sum(alpha**accepted for accepted in range(length + 1))


def verifying_cost(costs: ForwardCosts, rows: float) -> float:
    """Return v(rows) in plain steps, interpolated linearly between the measured row counts.

    Beyond the largest count, which siblings may reach, the last line goes on.

    Args:
        costs: The measured costs.
        rows: Tokens per sequence in the verifying pass, 1 or more.
    """
    assert rows >= 1
    return on_line([(cost.rows, cost.v) for cost in costs.verifying], rows)


def forward_cost(costs: ForwardCosts, stats: Stats) -> float:
    """Return the mean cost of a round's forwards in plain steps, drafting and verifying, for all drafters."""
    steps = stats.steps
    drafting = sum(costs.drafting[name].of(steps[name], drafts) for name, drafts in stats.drafts.items())
    verifying = sum(count * verifying_cost(costs, columns) for columns, count in stats.widths.items())
    return (drafting + verifying) / stats.rounds


def predicted_speedup(costs: ForwardCosts, stats: Stats) -> float:
    """Return S of a run's own rounds: its speed-up over plain decoding if only forwards took time."""
    return stats.tokens / stats.rounds / forward_cost(costs, stats)


def ceiling(costs: ForwardCosts, drafter: str, alpha: float) -> Ceiling:
    """Return the largest S over fixed draft lengths, from 1 to the widest measured pass less one.

    Args:
        costs: The measured costs.
        drafter: Name of the drafter whose costs apply.
        alpha: Probability that a drafted token is accepted, given that all before it in its draft were.
    """
    lengths = range(1, costs.verifying[-1].rows)
    speedups = [
        (
            mean_accepted_length(alpha, k) / (costs.drafting[drafter].of(k) + verifying_cost(costs, k + 1)),
            k,
        )
        for k in lengths
    ]
    speedup, length = max(speedups, key=lambda pair: pair[0])
    return Ceiling(alpha, length, speedup)
