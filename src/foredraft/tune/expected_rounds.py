"""Expected rounds: how many rounds decoding takes over given texts, and its τ, without decoding.

Given that the text continues with x, a drafted token x is accepted with probability min(1, q(x) / p(x)): an
accepted draft emits x with probability min(p(x), q(x)), and the target emits x with probability p(x)
(Leviathan et al. 2023, arXiv:2211.17192). At temperature 0 the probability is 1 or 0. Given the text, the
starts of rounds are a Markov chain over its positions, and a round emits

    E[tokens of the round] = 1 + sum_j prod_{i <= j} min(1, q_i(x_i) / p_i(x_i)).

τ is the mean over the starts *that decoding visits*. A plain mean over evenly spaced starts is too high: a
fully accepted draft skips easy tokens, so rounds begin at hard tokens more often. All arithmetic is in
float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ExpectedRounds", "Floats"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpectedRounds:
    """Expected rounds over R texts of up to N new tokens, at draft lengths 1 to K.

    Attributes:
        starts: Expected number (0 to 1) of rounds that begin with a text's new token n, [K, R, N].
        emitted: Expected tokens of such a round if the text did not end, [K, R, N].
        lengths: New tokens of each text, [R].
    """

    starts: Floats
    emitted: Floats
    lengths: NDArray[np.int64]

    @classmethod
    def from_acceptance(cls, acceptance: Floats, lengths: NDArray[np.int64]) -> ExpectedRounds:
        """Compute expected rounds from acceptance probabilities.

        Args:
            acceptance: [R, N, K]: probability that new token n + k is accepted as the k-th token (from 0)
                of a draft that begins with new token n. Entries past the end of a text may hold anything
                from 0 to 1.
            lengths: New tokens of each text, [R].
        """
        texts, positions, max_draft = acceptance.shape
        survival = np.cumprod(acceptance, 2)
        before = np.concatenate([np.ones((texts, positions, 1)), survival[:, :, :-1]], 2)
        # [K, R, N, K + 1]: at each draft length, the probability that a round emits 1, ..., K + 1 tokens
        emits = np.zeros((max_draft, texts, positions, max_draft + 1))
        for index in range(max_draft):
            emits[index, :, :, : index + 1] = (before - survival)[:, :, : index + 1]  # ends with a correction
            emits[index, :, :, index + 1] = survival[:, :, index]  # ends with a bonus token
        starts = np.zeros((max_draft, texts, positions + max_draft + 1))
        starts[:, :, 0] = 1.0
        within = np.arange(positions) < lengths[:, None]  # [R, N]
        for position in range(positions):
            starts[:, :, position] *= within[:, position]
            ahead = slice(position + 1, position + max_draft + 2)
            starts[:, :, ahead] += starts[:, :, position, None] * emits[:, :, position]
        emitted = 1 + np.moveaxis(np.cumsum(survival, 2), 2, 0)
        return cls(starts[:, :, :positions], emitted, lengths)

    @property
    def counts(self) -> Floats:
        """Rounds that decoding takes for all texts [K]; the last round of a text may be cut by its end."""
        counts: Floats = self.starts.sum((1, 2))
        return counts

    @property
    def taus(self) -> Floats:
        """τ at each draft length [K], over rounds that no end of a text cuts; over all if each is cut."""
        max_draft, _, positions = self.starts.shape
        stops = np.arange(positions) + np.arange(2, max_draft + 2)[:, None]  # [K, N], if all is accepted
        whole = self.starts * (stops[:, None] <= self.lengths[:, None])
        count = whole.sum((1, 2))
        with np.errstate(invalid="ignore"):
            means = (whole * self.emitted).sum((1, 2)) / count
        taus: Floats = np.where(count > 0, means, self.lengths.sum() / self.counts)
        return taus
