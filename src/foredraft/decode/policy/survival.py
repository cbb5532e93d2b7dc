"""What became of a drafter's drafts, and how likely the next ones survive: counts that forget."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from foredraft.decode.policy.reliability import ASSUMED, Reliability
from foredraft.decode.stats import Round

__all__ = ["KNOWN", "MET", "Pace", "Record", "Track"]

WEIGHT = 8.0  # rounds that what is assumed counts for, or known of other requests
TINY = 1e-3
FADES = 0.9, 0.98  # by which a request forgets a round, and all of them together
FADES_BY_TOKEN = 0.95, 0.99  # and a token of one bin
SLOWLY = 0.2  # of that, as a power, where nothing was drafted
MET = 2.0  # rounds after which a drafter is not new any more,
KNOWN = 8.0  # and after which it is taken for what it seems


class Track:
    """What became of one drafter's drafts, by position.

    For each position, the drafts that reached it and those whose token was kept there, both fading by `fade`
    a round, and slowly where nothing is drafted: why drafts end before it is not forgotten at once. The rate
    of all positions is shrunk towards what is assumed, and that of a position towards this:

        alpha = (kept + w alpha') / (tried + w),   r_j = (kept_j + w alpha r'_j / alpha') / (tried_j + w)

    with the alpha' and r' of a Track that knows more (other requests), or r'_j = alpha' = `assumed`.
    s_j = r_1 ... r_j.
    """

    def __init__(self, most: int, fade: float, prior: Track | None = None, assumed: float = ASSUMED) -> None:
        self.fade, self.slowly, self.prior, self.assumed = fade, fade**SLOWLY, prior, assumed
        self.tried, self.kept = [0.0] * most, [0.0] * most

    @property
    def seen(self) -> float:
        """Rounds that it still remembers."""
        return self.tried[0]

    @property
    def weight(self) -> float:
        """Rounds that what others know counts for: the more, the more of it is of these drafts, which are not
        to count twice."""
        if self.prior is None:
            return WEIGHT
        return WEIGHT * (1 + self.seen / max(self.prior.seen - self.seen, TINY))

    @property
    def alpha(self) -> float:
        """P(a drafted token is kept | all before it in its draft were)."""
        assumed = self.assumed if self.prior is None else self.prior.alpha
        weight = self.weight
        return (sum(self.kept) + weight * assumed) / (sum(self.tried) + weight)

    def learn(self, drafted: int, accepted: int) -> None:
        fade, slowly = self.fade, self.slowly
        self.tried = [fade * x for x in self.tried[:drafted]] + [slowly * x for x in self.tried[drafted:]]
        self.kept = [fade * x for x in self.kept[:drafted]] + [slowly * x for x in self.kept[drafted:]]
        for position in range(min(accepted + 1, drafted, len(self.tried))):
            self.tried[position] += 1
            self.kept[position] += position < accepted

    def survives(self, most: int) -> tuple[float, ...]:
        """s_1 ... s_most."""
        return tuple(accumulate(self.rates(most), mul))

    def rates(self, most: int) -> list[float]:
        """r_1 ... r_most."""
        alpha, prior, weight = self.alpha, self.prior, self.weight
        expected = [alpha] * most
        if prior is not None:
            level = alpha / prior.alpha
            expected = [min(1.0, level * rate) for rate in prior.rates(most)]
        places = zip(self.kept, self.tried, expected, strict=False)
        return [(kept + weight * rate) / (tried + weight) for kept, tried, rate in places]


class Pace:
    """What a round comes to in which a drafter stops by how sure it is: means of the tokens that it gives, of
    those drafted, and of the steps taken, fading by `fade` a round and shrunk towards those of `prior`."""

    def __init__(self, fade: float, prior: Pace | None = None) -> None:
        self.fade, self.prior = fade, prior
        self.seen = 0.0
        self.sums = 0.0, 0.0, 0.0

    def learn(self, outcome: Round) -> None:
        self.seen = self.fade * self.seen + 1
        tokens, drafted, steps = (self.fade * x for x in self.sums)
        self.sums = tokens + 1 + outcome.accepted, drafted + outcome.drafted, steps + len(outcome.sure)

    def mean(self) -> tuple[float, float, float] | None:
        """(tokens, drafted, steps) of a round; None while nothing is known."""
        prior = None if self.prior is None else self.prior.mean()
        if prior is None:
            return None if self.seen < MET else self._over(self.seen, self.sums)
        sums = [own + WEIGHT * other for own, other in zip(self.sums, prior, strict=True)]
        return self._over(self.seen + WEIGHT, sums)

    @staticmethod
    def _over(count: float, sums: Iterable[float]) -> tuple[float, float, float]:
        tokens, drafted, steps = (x / count for x in sums)
        return tokens, drafted, steps


class Record:
    """All that is known of a drafter: by position, by how sure it was, and of whole rounds; of one request,
    or of all of them: the `prior` of the first. assumed: P(a drafted token is kept), while nothing is."""

    def __init__(self, most: int, prior: Record | None = None, assumed: float = ASSUMED) -> None:
        shared = prior is None
        self.track: Track = Track(most, FADES[shared], None if prior is None else prior.track, assumed)
        self.reliability: Reliability = Reliability(
            FADES_BY_TOKEN[shared], None if prior is None else prior.reliability
        )
        self.pace: Pace = Pace(FADES[shared], None if prior is None else prior.pace)

    @property
    def seen(self) -> float:
        """Rounds that it still remembers."""
        return self.track.seen

    def learn(self, outcome: Round, *, paced: bool) -> None:
        """paced: nothing but how sure it was had ended the draft before it was as long as drafts may be."""
        # one that had nothing to say was asked in vain
        self.track.learn(max(outcome.drafted, 1), outcome.accepted)
        if outcome.sure:
            self.reliability.learn(outcome.sure, outcome.drafted, outcome.accepted)
            if paced or self.pace.seen < MET:
                self.pace.learn(outcome)
