"""Probes: inputs whose exact results nearly cancel, so that the order of the additions shows in the bits.

Contract: two kernels that add the same terms in different orders differ by a last bit of float32, which
rounding to bfloat16 hides all but once in ten thousand values: a comparison on ordinary inputs passes, and a
long text diverges all the same. Here every sum is of terms against their negatives at shuffled places. What
is left *is* the rounding error, and it is kept in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.model.attention import causal_masks, masked_attention
from foredraft.model.cache import KVCache
from foredraft.model.layers import Product
from foredraft.model.spec import ModelSpec

BLOCK = 512  # output channels of a probing weight that differ; they repeat from there on
AMPLITUDE = 1000.0  # of queries and keys, scaled: the rounding of their products must move a softmax


class ProductProbe:
    """The product that `make` makes of a weight [M, K], on a weight and on rows that cancel.

    Where the product is packed, nothing else of the weight is kept.
    """

    def __init__(
        self,
        make: Callable[[Tensor], Product],
        shape: tuple[int, int],
        rows: int,
        like: Tensor,
        random: torch.Generator,
    ) -> None:
        outputs, columns = shape
        half = columns // 2
        weight, x = _normal((min(outputs, BLOCK), half), random), _normal((rows, half), random)
        order = torch.randperm(2 * half, generator=random)
        weight, x = weight.to(like.dtype), x.to(like.dtype)
        both = torch.zeros(weight.shape[0], columns, dtype=like.dtype)
        both[:, order] = torch.cat([weight, -weight], 1)
        self.rows = torch.zeros(rows, columns, dtype=like.dtype)
        self.rows[:, order] = torch.cat([x, x], 1)
        self.rows = self.rows.to(like.device)
        whole = both.to(like.device).repeat(-(-outputs // both.shape[0]), 1)[:outputs]
        self.product = make(whole)

    def agrees(self, rows: int, reference: int) -> bool:
        """Whether a product of so many rows gives each the bits that one of `reference` rows gives it."""
        shared = min(rows, reference)
        # the shared rows stand at the other end, among other neighbours
        moved = self.product(self.rows.roll(rows - shared, 0)[:rows])[rows - shared :]
        return torch.equal(moved, self.product(self.rows[:reference])[:shared])


class AttentionProbe:
    """Attention of one row over a context whose scores are rounding, and half of whose output is.

    Keys come in pairs with opposite values in the first half of the channels: the weighted sum of those
    cancels. The other half does not, and shows the scores.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context: int,
        queries: int,
        like: Tensor,
        random: torch.Generator,
        blocked: bool = False,
    ) -> None:
        """blocked: for the kernels."""
        self.spec = replace(spec, layers=1, windows=(None,))
        self.context, self.queries = context, queries
        heads, dim, half = spec.kv_heads, spec.head_dim, spec.head_dim // 2
        positions = context + queries
        order = torch.randperm(dim, generator=random)
        amplitude = AMPLITUDE / spec.attention_scale**0.5  # shared out, for float16 ends at 65504
        q = _normal((1, heads, queries * spec.groups, half), random) * amplitude
        k = _normal((1, heads, positions, half), random) * amplitude
        v = _normal((1, heads, positions, dim), random)
        pairs = torch.randperm(context // 2 * 2, generator=random)
        k[:, :, pairs[::2]] = k[:, :, pairs[1::2]]
        v[:, :, pairs[::2], :half] = -v[:, :, pairs[1::2], :half]
        v[:, :, len(pairs) :, :half] = 0.0
        self.q, self.k = (
            torch.cat([x, x * sign], -1)[..., order.argsort()].to(like.device, like.dtype)
            for x, sign in ((q, 1.0), (k, -1.0))
        )  # [1, Hk, T * G, D], [1, Hk, P, D]
        self.v = v.to(like.device, like.dtype)
        self.noise = _normal((1, heads, 1024, dim), random).to(like.device, like.dtype)
        self.cache = KVCache(self.spec, 8, 3584, device=like.device, dtype=like.dtype, blocked=blocked)

    def output(self, batch: int, queries: int, length: int, place: int, scale: float, apart: bool) -> Tensor:
        """[T, Hk, G, D] of the probed row, at `place` in a batch, with garbage of `scale` past its
        context."""
        self.fill(batch, length, place, scale)
        k, v = self.cache.read(0, 0, batch, length)
        q, groups = self.queries_of(batch, queries, place), self.spec.groups
        starts = torch.tensor([max(0, self.context - 7 * abs(row - place)) for row in range(batch)])
        positions = starts.to(q.device)[:, None] + torch.arange(queries, device=q.device)
        mask = causal_masks(self.spec, positions, length, q.dtype)[None]
        out = masked_attention(self.spec, q, k, v, mask, apart)[place]  # [Hk, T * G, D]
        return out.view(-1, queries, groups, out.shape[-1]).transpose(0, 1)

    def fill(self, batch: int, length: int, place: int, scale: float) -> None:
        """Have the cache hold the probed row, at `place` in the batch, and garbage."""
        noise = self.noise[0].repeat(1, length // 1024 + 1, 1)[:, :length] * scale  # [Hk, L, D]
        for row in range(batch):
            self.cache.write(0, row, 0, noise, noise)
        self.cache.write(0, place, 0, self.k[0], self.v[0])

    def queries_of(self, batch: int, queries: int, place: int) -> Tensor:
        """[B, Hk, T * G, D]: the probed row's, and others."""
        count = queries * self.spec.groups
        q = self.q[:, :, :count].flip(2).repeat(batch, 1, 1, 1)
        q[place] = self.q[0, :, :count]
        return q


def _normal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random)
