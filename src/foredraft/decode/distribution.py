"""Distribution: the next-token distributions p and q, exactly as the acceptance rules see them.

A distribution is *dense*, float32 probabilities after every sampling transform, or *one-hot*, the id of the
only possible token (greedy decoding, deterministic drafters). Every operation means the same for both, and a
batch may mix them row by row. Products with a coin are float64; no epsilon, no clamp of a probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.decode.vocab_ops import TORCH_VOCAB_OPS, VocabOps, total


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distributions of B rows at T positions."""

    probs: Tensor | None = None  # [B, T, V] float32; None where every row is one-hot
    ids: Tensor | None = None  # [B, T] int64, the tokens of one-hot rows; None where no row is
    one_hot: Tensor | None = None  # [B] bool, rows for which `ids` holds; None where one holds for all
    vocab_ops: VocabOps = TORCH_VOCAB_OPS  # computes with it

    def __post_init__(self) -> None:
        assert (self.probs is not None) or (self.ids is not None)
        assert (self.one_hot is not None) == (self.probs is not None and self.ids is not None)

    @classmethod
    def along(cls, steps: Sequence[Distribution]) -> Distribution:
        """Join the distributions of successive positions, all of one representation."""
        first = steps[0]
        probs = [step.probs for step in steps if step.probs is not None]
        ids = [step.ids for step in steps if step.ids is not None]
        return cls(torch.cat(probs, 1) if probs else None, torch.cat(ids, 1) if ids else None, first.one_hot)

    @classmethod
    def combine(
        cls, parts: Sequence[tuple[Tensor, Distribution]], tokens: Tensor, vocabulary: int
    ) -> Distribution:
        """Return one distribution of rows [B] bool of several, padded to the shape of tokens [B, K]."""
        ids = placed([(own, q.ids) for own, q in parts if q.ids is not None], torch.zeros_like(tokens))
        dense = [(own, q.probs) for own, q in parts if q.probs is not None]
        if not dense:
            return cls(ids=ids)
        one_hot = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        for own, q in parts:
            if q.probs is not None:
                one_hot = (torch.zeros_like(one_hot) if q.one_hot is None else q.one_hot).where(own, one_hot)
        return cls(placed(dense, torch.zeros(*tokens.shape, vocabulary, device=tokens.device)), ids, one_hot)

    @property
    def columns(self) -> int:
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
        probs, ids, one_hot = (None if x is None else x[index] for x in (self.probs, self.ids, self.one_hot))
        return Distribution(probs, ids, one_hot, self.vocab_ops)

    def draw(self, pick: Callable[[Tensor], Tensor]) -> Tensor:
        """Draw tokens [B, T] int64; `pick` draws from [B, T, V], and one-hot rows need no noise."""
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
        """Return what is left to draw from without tokens [B], in rows where `where` [B], with T = 1."""
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
        return replace(self, probs=(self.probs / total(self.probs)).where(where[:, None, None], self.probs))

    def scaled(self, weight: Tensor) -> Distribution:
        """Return the distributions times weight [B, T], unnormalised; one-hot rows stay as they are."""
        if self.probs is None:
            return self
        return replace(self, probs=self.probs * weight[..., None].to(torch.float32))

    def minus(self, q: Distribution, where: Tensor) -> Distribution:
        """Return the residual max(p - q, 0), unnormalised, in rows `where` [B] any is positive, else p."""
        if self.probs is None:
            return self
        vocabulary = self.probs.shape[2]
        p, drafted = self.dense(vocabulary), q.ids if q.probs is None else q.dense(vocabulary)
        assert drafted is not None
        return replace(self, probs=self.vocab_ops.residual(p, drafted, where[:, None]))

    @property
    def _one_hot_rows(self) -> Tensor:
        assert self.one_hot is not None
        return self.one_hot


def placed(parts: Sequence[tuple[Tensor, Tensor]], whole: Tensor) -> Tensor:
    """Return `whole` [B, K, ...] with each part in its rows [B] bool; a part may have fewer columns."""
    for own, part in parts:
        into = whole[:, : part.shape[1]]
        into.copy_(part.where(own.view(-1, *(1,) * (part.dim() - 1)), into))
    return whole
