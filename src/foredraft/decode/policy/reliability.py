"""How likely a drafted token is kept, by how sure its drafter was: a reliability curve that forgets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq

__all__ = ["EDGES", "Reliability"]

# Of the bins: most tokens are drafted with a probability near 1, where differences tell most.
EDGES = 0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96, 0.985, 0.995
ASSUMED = 0.7  # P(a drafted token is kept) of a drafter that nobody knows
WEIGHTS = 2.0, 4.0  # tokens of a bin that what is assumed counts for, and what is known of other requests


class Reliability:
    """kept, tried: of each bin, the tokens that the target looked at, and of these the kept ones; both fade
    by `fade` with each. A bin's chance is shrunk towards that of `prior`, which knows more, or halfway
    between its own middle and what is assumed.
    """

    def __init__(self, fade: float, prior: Reliability | None = None) -> None:
        self.fade, self.prior = fade, prior
        self.kept, self.tried = [0.0] * (len(EDGES) + 1), [0.0] * (len(EDGES) + 1)

    def learn(self, sure: Seq[float], drafted: int, accepted: int) -> None:
        """Of a draft whose first `accepted` tokens were kept; sure: of each token."""
        kept, tried, fade = self.kept, self.tried, self.fade
        for position in range(min(accepted + 1, drafted)):
            at = bisect_right(EDGES, sure[position])
            tried[at] = fade * tried[at] + 1
            kept[at] = fade * kept[at] + (position < accepted)

    def chances(self) -> list[float]:
        """P(a drafted token is kept | those before it in its draft were), of every bin."""
        if self.prior is None:
            weight, assumed = WEIGHTS[0], FIRST
        else:
            weight, assumed = WEIGHTS[1], self.prior.chances()
        return [
            (kept + weight * prior) / (tried + weight)
            for kept, tried, prior in zip(self.kept, self.tried, assumed, strict=True)
        ]


FIRST = [((low + high) / 2 + ASSUMED) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
