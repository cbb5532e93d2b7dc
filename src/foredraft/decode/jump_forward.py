"""Jump-forward: where a constraint forces the next tokens, they are a draft that costs nothing.

The forced text may have several tokenisations, so the target verifies the draft like any other, and the
output's distribution is its own (Zheng et al. 2024, SGLang, arXiv:2312.07104, without its retokenisation).
"""

from __future__ import annotations

from foredraft.decode.drafter import Guesser
from foredraft.decode.sequence import Sequence

__all__ = ["JUMP_FORWARD", "JumpForward", "forced_length"]

JUMP_FORWARD = "jump-forward"


class JumpForward(Guesser):
    """Proposes the tokens that each sequence's constraint forces. Every constrained sequence has it."""

    name = JUMP_FORWARD

    def propose(self, requests: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            [] if sequence.constraint is None else sequence.constraint.forced(budget)
            for sequence, budget in requests
        ]


def forced_length(sequence: Sequence, most: int) -> int:
    """Return how many tokens the sequence's constraint forces next, at most `most`."""
    if sequence.constraint is None or most < 1:
        return 0
    return len(sequence.constraint.forced(most))
