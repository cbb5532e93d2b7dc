"""How likely drafted tokens survive: counts that forget."""

from __future__ import annotations

__all__ = ["Track"]

BASE = 0.7  # P(a drafted token is accepted) of a drafter that nobody knows
WEIGHTS = 2.0, 4.0  # rounds that what is assumed counts for: at first, and once others have seen as many


class Track:
    """What became of one drafter's drafts, by position.

    For each position, the drafts that reached it and those whose token was kept there, both fading by `fade`
    a round. The rate of a position is shrunk towards that of all positions, and this towards what is assumed:

        alpha = (kept + w prior) / (tried + w),   r_j = (kept_j + w alpha) / (tried_j + w)

    with the prior of a Track that knows more (other requests), or BASE. s_j = r_1 ... r_j.
    """

    def __init__(self, most: int, fade: float, prior: Track | None = None) -> None:
        self.fade, self.prior = fade, prior
        self.tried, self.kept = [0.0] * most, [0.0] * most

    @property
    def seen(self) -> float:
        """Rounds that it still remembers."""
        return self.tried[0]

    @property
    def alpha(self) -> float:
        """P(a drafted token is kept | all before it in its draft were)."""
        assumed = BASE if self.prior is None else self.prior.alpha
        return (sum(self.kept) + self._weight * assumed) / (sum(self.tried) + self._weight)

    @property
    def _weight(self) -> float:
        return WEIGHTS[0] if self.prior is None else min(max(self.prior.seen, WEIGHTS[0]), WEIGHTS[1])

    def learn(self, drafted: int, accepted: int) -> None:
        self.tried = [self.fade * x for x in self.tried]
        self.kept = [self.fade * x for x in self.kept]
        for position in range(min(accepted + 1, drafted, len(self.tried))):
            self.tried[position] += 1
            self.kept[position] += position < accepted

    def survives(self, most: int) -> tuple[float, ...]:
        """s_1 ... s_most."""
        weight, alpha, product, products = self._weight, self.alpha, 1.0, []
        for kept, tried in zip(self.kept[:most], self.tried[:most], strict=True):
            product *= (kept + weight * alpha) / (tried + weight)
            products.append(product)
        return tuple(products)
