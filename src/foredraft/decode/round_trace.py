"""Trace: the course of one round of one sequence, for people who want to look at it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundTrace"]


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one output.

    Attributes:
        start: New tokens before it.
        drafter: The drafter; None in a plain step.
        budget: How many tokens the policy allowed. A shorter draft was ended by the policy or the drafter.
        draft: The proposed ids.
        p: The target's probability of each drafted token; empty if discarded. Under the lossy rule at
            temperature 0 it is that of temperature 1, by which the rule judges.
        q: The drafter's probability of each drafted token; empty if discarded.
        accepted: How many were kept.
        next_token: The target's own token after them: a correction, the bonus, or a plain step.
        next_p: The target's probability of it.
        emitted: Tokens appended; an end of the text may cut them short, and a ban's rollback may make it
            negative.
        discarded: The target's logits along the draft were not finite, so nothing was judged.
        rollback: Under the lossy rule, the surprise -log p above which a drafted token was cut, in nats; None
            under the lossless ones.
        legal: Tokens that the constraint allowed at each judged position; None without a constraint.
        after_sibling: The target's token after `next_token`, which is a sibling of the rejected token; None
            where it is none.

    Examples:
        >>> params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        >>> [output] = llm.generate("def add(a, b):", params, trace=True)
        >>> len(output.trace) == output.stats.rounds, sum(each.emitted for each in output.trace)
        (True, 8)
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
    legal: list[int] | None = None
    after_sibling: int | None = None
