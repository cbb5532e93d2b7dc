"""Law: the next-token distributions p and q, exactly as the acceptance rules see them.

A law holds one categorical distribution per (row, position). Two representations, one meaning:

- *dense*: float32 probabilities over the vocabulary, after every sampling transform;
- *certain*: the id of the only possible token. Greedy decoding (temperature 0) and deterministic
  drafters are one-hot laws; an id is all there is to know about one, so none is ever spelled out
  over the vocabulary. That is a representation, not another rule: every operation below means the
  same for both, and a batch may mix them row by row.

Arithmetic is float32 (products with a coin float64); no epsilon, no clamp of a probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps

__all__ = ["Distribution"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of `B` rows at `T` positions.

    probs:   [B, T, V] float32, or None when every row is certain.
    ids:     [B, T] int64, or None when no row is certain.
    certain: [B] bool: rows that `ids` speaks for; None when `probs` or `ids` alone speaks for all.
    operators: what computes with it.
    """

    probs: Tensor | None = None
    ids: Tensor | None = None
    one_hot: Tensor | None = None
    vocab_ops: VocabOps = TORCH_VOCAB_OPS

    def __post_init__(self) -> None:
        assert (self.probs is not None) or (self.ids is not None)
        assert (self.one_hot is not None) == (self.probs is not None and self.ids is not None)

    @classmethod
    def along(cls, laws: Sequence[Distribution]) -> Distribution:
        """Laws of successive positions, of one representation -> one law."""
        first = laws[0]
        probs = (
            None
            if first.probs is None
            else torch.cat([law.probs for law in laws if law.probs is not None], 1)
        )
        ids = None if first.ids is None else torch.cat([law.ids for law in laws if law.ids is not None], 1)
        return cls(probs, ids, first.one_hot)

    @property
    def columns(self) -> int:
        """T"""
        spoken = self.ids if self.probs is None else self.probs
        assert spoken is not None
        return spoken.shape[1]

    @property
    def all_one_hot(self) -> bool:
        return self.probs is None

    def at(self, tokens: Tensor) -> Tensor:
        """Probability of `tokens` [B, K], K <= T, each under its own position's law -> [B, K]."""
        k = tokens.shape[1]
        dense = None if self.probs is None else self.probs[:, :k].gather(2, tokens[..., None])[..., 0]
        if self.ids is None:
            assert dense is not None
            return dense
        hot = (tokens == self.ids[:, :k]).to(torch.float32)
        return hot if dense is None else torch.where(self._one_hot_rows[:, None], hot, dense)

    def position(self, index: Tensor) -> Distribution:
        """The law at position `index` [B] of every row -> Law with T = 1."""
        if self.columns == 1:
            return self
        probs = ids = None
        if self.probs is not None:
            at = index[:, None, None].expand(-1, 1, self.probs.shape[2])
            probs = self.probs.gather(1, at)
        if self.ids is not None:
            ids = self.ids.gather(1, index[:, None])
        return Distribution(probs, ids, self.one_hot, self.vocab_ops)

    def rows(self, index: Tensor) -> Distribution:
        """Of some rows [R]."""
        one, two, three = (None if x is None else x[index] for x in (self.probs, self.ids, self.one_hot))
        return Distribution(one, two, three, self.vocab_ops)

    def draw(self, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """One token per row and position -> [B, T] int64; `pick` draws from [B, T, V]. Certain rows need no
        noise."""
        if self.probs is None:
            assert self.ids is not None
            return self.ids
        drawn = pick(self.probs)
        return drawn if self.ids is None else torch.where(self._one_hot_rows[:, None], self.ids, drawn)

    def weights(self, vocabulary: int) -> Tensor:
        """Spelled out over the vocabulary -> [B, T, V] float32."""
        if self.ids is None:
            assert self.probs is not None
            return self.probs
        hot = torch.nn.functional.one_hot(self.ids, vocabulary).to(torch.float32)
        return hot if self.probs is None else torch.where(self._one_hot_rows[:, None, None], hot, self.probs)

    def minus(self, q: Distribution, where: Tensor) -> Distribution:
        """The residual norm(max(p - q, 0)), unnormalised, in rows where `where` [B]; p elsewhere.

        A residual that is zero everywhere (p == q up to rounding) falls back to p: there is nothing
        left to correct. A certain p needs no arithmetic: wherever its token was not drafted, its
        token is the whole residual.
        """
        if self.probs is None:
            return self
        vocabulary = self.probs.shape[2]
        p, taken = self.weights(vocabulary), q.ids if q.probs is None else q.weights(vocabulary)
        assert taken is not None
        left = self.vocab_ops.residual(p, taken, where[:, None])
        return Distribution(left, self.ids, self.one_hot, self.vocab_ops)

    @property
    def _one_hot_rows(self) -> Tensor:
        assert self.one_hot is not None
        return self.one_hot
