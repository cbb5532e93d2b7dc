"""Trace: what happened in one round of one sequence, for people who want to look at it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundTrace"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one output.

    Attributes:
        start: New tokens before it.
        drafter: Who drafted; None in a plain step.
        budget: How many tokens the policy allowed. A shorter draft was ended by the policy or the drafter.
        draft: The proposed ids.
        p: The probability that the target's law gave each of them; empty if discarded. Under the lossy rule
            at temperature 0, that by which it judges: the law of temperature 1.
        q: The probability that the drafter's law gave each; empty if discarded.
        accepted: How many were kept.
        next_token: The target's own token after them: a correction, the bonus, or a plain step.
        next_p: Its probability by the target's law.
        emitted: Tokens appended; an end of the text may cut them short, and a ban's rollback may make it
            negative.
        discarded: The target's logits along the draft were not finite, so nothing was judged.
        rollback: Under the lossy rule, the surprise -log p above which a drafted token was cut, in nats; None
            under the lossless ones.
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
    discarded: bool = False
    rollback: float | None = None
