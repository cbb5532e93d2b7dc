"""Trace: what happened in one round of one sequence, for people who want to look at it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundTrace"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round.

    start: new tokens before it. drafter: None in a plain step. budget: how many tokens the policy allowed; a
    shorter draft was ended by the policy or the drafter. draft: the proposed ids, with p and q, the
    probabilities that the target's and the drafter's laws gave them. accepted: how many were kept.
    next_token: the target's correction or bonus, with its next_p. emitted: tokens appended; an end of the
    text may cut them short, and a ban's rollback may make it negative.
    """

    start: int
    drafter: str | None
    budget: int
    draft: list[int]
    p: list[float]
    q: list[float]
    accepted: int
    next_token: int
    next_p: float
    emitted: int
