"""How many rounds a text takes, and how long they are: mean accepted lengths without decoding.

Contract: pure arithmetic on chances, in float64. The chance that a drafted token is accepted, given that the
text goes on with x, is min(1, q(x) / p(x)): accepted drafts bring x with probability min(p(x), q(x)), and x
itself comes with p(x) (Leviathan et al. 2023, arXiv:2211.17192). At temperature 0 it is 1 or 0. So, given the
text, where rounds begin is a Markov chain over its positions, and from a start

    E[tokens of the round] = 1 + sum_j prod_{i <= j} min(1, q_i(x_i) / p_i(x_i)).

tau is the mean of that over the starts *as decoding visits them*. Drafts laid evenly over a text would count
every token alike, but one that is accepted whole leaps over easy tokens, so their plain mean is too high.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Rounds"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of several texts, at draft lengths 1 to K.

    starts [K, R, N]: the expected number of rounds that begin with a text's new token n: 0, 1 or between.
    emitted [K, R, N]: the expected tokens of such a round, of a text without end. lengths [R]: new tokens.
    """

    starts: Floats
    emitted: Floats
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, chances: Floats, lengths: NDArray[np.int64]) -> Rounds:
        """chances [R, N, K]: of new token n + k, where a round that begins with token n drafts it as its k-th
        (from 0); past a text, anything from 0 to 1."""
        texts, positions, longest = chances.shape
        survival = np.cumprod(chances, 2)
        before = np.concatenate([np.ones((texts, positions, 1)), survival[:, :, :-1]], 2)
        # of a round at each draft length, the chance to emit 1, ..., K + 1 tokens
        ends = np.zeros((longest, texts, positions, longest + 1))
        for index in range(longest):
            ends[index, :, :, : index + 1] = (before - survival)[:, :, : index + 1]  # with a correction
            ends[index, :, :, index + 1] = survival[:, :, index]  # with a bonus token
        starts = np.zeros((longest, texts, positions + longest + 1))
        starts[:, :, 0] = 1.0
        within = np.arange(positions) < lengths[:, None]  # [R, N]
        for position in range(positions):
            starts[:, :, position] *= within[:, position]
            ahead = slice(position + 1, position + longest + 2)
            starts[:, :, ahead] += starts[:, :, position, None] * ends[:, :, position]
        emitted = 1 + np.moveaxis(np.cumsum(survival, 2), 2, 0)
        return cls(starts[:, :, :positions], emitted, lengths)

    @property
    def counts(self) -> Floats:
        """Rounds that it takes to write the texts, the last one of each cut where it ends -> [K]."""
        counts: Floats = self.starts.sum((1, 2))
        return counts

    @property
    def taus(self) -> Floats:
        """Mean accepted lengths -> [K], of rounds that no end of a text cuts; else, of all."""
        longest, _, positions = self.starts.shape
        ends = np.arange(positions) + np.arange(2, longest + 2)[:, None]  # [K, N] of a round accepted whole
        whole = self.starts * (ends[:, None] <= self.lengths[:, None])
        count = whole.sum((1, 2))
        with np.errstate(invalid="ignore"):
            means = (whole * self.emitted).sum((1, 2)) / count
        taus: Floats = np.where(count > 0, means, self.lengths.sum() / self.counts)
        return taus
