"""Distribution: the next-token distributions p and q, exactly as the acceptance rules see them.

A `Distribution` holds one categorical distribution per (row, position). Two representations, one meaning:

- *dense*: float32 probabilities over the vocabulary, after every sampling transform;
- *one-hot*: the id of the only possible token. Greedy decoding (temperature 0) and deterministic drafters are
  one-hot. An id is all there is to know, so it is never expanded over the vocabulary. Every operation below
  means the same for both representations, and a batch may mix them row by row.

Arithmetic is float32 (products with a coin are float64): no epsilon, no clamp of a probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps
from foredraft.decode.vocab_sums import total

__all__ = ["Distribution"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of B rows at T positions.

    Attributes:
        probs: [B, T, V] float32; None where every row is one-hot.
        ids: [B, T] int64, the tokens of one-hot rows; None where no row is.
        one_hot: [B] bool, rows for which `ids` holds; None where `probs` or `ids` alone holds for all rows.
        vocab_ops: Computes with it.
    """

    probs: Tensor | None = None
    ids: Tensor | None = None
    one_hot: Tensor | None = None
    vocab_ops: VocabOps = TORCH_VOCAB_OPS

    def __post_init__(self) -> None:
        assert (self.probs is not None) or (self.ids is not None)
        assert (self.one_hot is not None) == (self.probs is not None and self.ids is not None)

    @classmethod
    def along(cls, steps: Sequence[Distribution]) -> Distribution:
        """Join the distributions of successive positions, all of one representation."""
        first = steps[0]
        probs = (
            None
            if first.probs is None
            else torch.cat([step.probs for step in steps if step.probs is not None], 1)
        )
        ids = (
            None if first.ids is None else torch.cat([step.ids for step in steps if step.ids is not None], 1)
        )
        return cls(probs, ids, first.one_hot)

    @classmethod
    def combine(
        cls, parts: Sequence[tuple[Tensor, Distribution]], tokens: Tensor, vocabulary: int
    ) -> Distribution:
        """Return one distribution of rows that come from several, padded to the shape of tokens [B, K].

        Args:
            parts: Distributions, each with the rows that it holds for, [B] bool.
            tokens: Drafted tokens; their shape is the result's.
            vocabulary: Size V.
        """
        ids = torch.zeros_like(tokens)
        one_hot = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        any_dense = any(q.probs is not None for _, q in parts)
        probs = torch.zeros(*tokens.shape, vocabulary, device=tokens.device) if any_dense else None
        for own, q in parts:
            k = q.columns
            if q.ids is not None:
                ids[:, :k] = q.ids.where(own[:, None], ids[:, :k])
            if q.probs is not None:
                assert probs is not None
                probs[:, :k] = q.probs.where(own[:, None, None], probs[:, :k])
                mixed = torch.zeros_like(one_hot) if q.one_hot is None else q.one_hot
                one_hot = mixed.where(own, one_hot)
        return cls(ids=ids) if probs is None else cls(probs, ids, one_hot)

    @property
    def columns(self) -> int:
        """Return T."""
        held = self.ids if self.probs is None else self.probs
        assert held is not None
        return held.shape[1]

    @property
    def all_one_hot(self) -> bool:
        return self.probs is None

    def at(self, tokens: Tensor) -> Tensor:
        """Return the probability of tokens [B, K], K <= T, each at its own position -> [B, K]."""
        k = tokens.shape[1]
        dense = None if self.probs is None else self.probs[:, :k].gather(2, tokens[..., None])[..., 0]
        if self.ids is None:
            assert dense is not None
            return dense
        hot = (tokens == self.ids[:, :k]).to(torch.float32)
        return hot if dense is None else torch.where(self._one_hot_rows[:, None], hot, dense)

    def position(self, index: Tensor) -> Distribution:
        """Return the distribution at position `index` [B] of every row, with T = 1."""
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
        """Return the rows `index` [R]."""
        probs, ids, one_hot = (None if x is None else x[index] for x in (self.probs, self.ids, self.one_hot))
        return Distribution(probs, ids, one_hot, self.vocab_ops)

    def draw(self, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw one token per row and position -> [B, T] int64; `pick` draws from [B, T, V].

        One-hot rows need no noise.
        """
        if self.probs is None:
            assert self.ids is not None
            return self.ids
        drawn = pick(self.probs)
        return drawn if self.ids is None else torch.where(self._one_hot_rows[:, None], self.ids, drawn)

    def dense(self, vocabulary: int) -> Tensor:
        """Return the probabilities of all rows over the vocabulary -> [B, T, V] float32."""
        if self.ids is None:
            assert self.probs is not None
            return self.probs
        hot = torch.nn.functional.one_hot(self.ids, vocabulary).to(torch.float32)
        return hot if self.probs is None else torch.where(self._one_hot_rows[:, None, None], hot, self.probs)

    def without(self, tokens: Tensor, heir: Tensor, where: Tensor) -> Distribution:
        """Return what is left to draw from without tokens [B], in rows where `where` [B], with T = 1.

        Args:
            tokens: Were drawn.
            heir: [B] the only possible tokens of one-hot rows after them.
            where: Rows in which any token is left.
        """
        probs = ids = None
        if self.probs is not None:
            left = self.probs.scatter(2, tokens[:, None, None], 0.0)
            probs = (left / total(left)).where(where[:, None, None], self.probs)
        if self.ids is not None:
            ids = heir[:, None].where(where[:, None], self.ids)
        return Distribution(probs, ids, self.one_hot, self.vocab_ops)

    def normalised(self, where: Tensor) -> Distribution:
        """Return the distributions with sums of 1, in rows where `where` [B], with T = 1."""
        if self.probs is None:
            return self
        probs = (self.probs / total(self.probs)).where(where[:, None, None], self.probs)
        return Distribution(probs, self.ids, self.one_hot, self.vocab_ops)

    def scaled(self, weight: Tensor) -> Distribution:
        """Return the distributions times weight [B, T], unnormalised; one-hot rows stay as they are."""
        if self.probs is None:
            return self
        probs = self.probs * weight[..., None].to(torch.float32)
        return Distribution(probs, self.ids, self.one_hot, self.vocab_ops)

    def minus(self, q: Distribution, where: Tensor) -> Distribution:
        """Return the residual norm(max(p - q, 0)), unnormalised, in rows where `where` [B]; p elsewhere.

        A residual that is zero everywhere (p == q up to rounding) falls back to p: there is nothing left to
        correct. A one-hot p needs no arithmetic: where its token was not drafted, it is the whole residual.
        """
        if self.probs is None:
            return self
        vocabulary = self.probs.shape[2]
        p, drafted = self.dense(vocabulary), q.ids if q.probs is None else q.dense(vocabulary)
        assert drafted is not None
        residual = self.vocab_ops.residual(p, drafted, where[:, None])
        return Distribution(residual, self.ids, self.one_hot, self.vocab_ops)

    @property
    def _one_hot_rows(self) -> Tensor:
        assert self.one_hot is not None
        return self.one_hot
