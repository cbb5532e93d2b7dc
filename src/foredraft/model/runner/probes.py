"""Cancelling probes: inputs whose exact results are near zero, so that the bits show the order of additions.

Two kernels that add the same terms in different orders differ in a last bit of float32. Rounding to bfloat16
hides that in all but one of ten thousand values, and a long text diverges all the same. A probe sums terms
and their negatives at shuffled places: the result *is* the rounding error, in full precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foredraft.model.attention import causal_masks, masked_attention
from foredraft.model.cache import KVCache
from foredraft.model.layers import Product
from foredraft.model.spec import ModelSpec

DISTINCT_OUTPUTS = 512  # outputs of a probing weight that differ; the others repeat them
# of queries and keys, the attention scale included: the rounding of scores must move the softmax
AMPLITUDE = 1000.0


class ProductProbe:
    """A product on a cancelling weight and cancelling rows. It keeps no weight besides the product's own."""

    def __init__(
        self,
        make: Callable[[Tensor], Product],  # makes the product of a weight [M, K]
        shape: tuple[int, int],  # (M, K)
        rows: int,
        like: Tensor,  # a tensor of the device and dtype
        random: torch.Generator,  # the source of values
    ) -> None:
        outputs, columns = shape
        half = columns // 2
        weight, x = _normal((min(outputs, DISTINCT_OUTPUTS), half), random), _normal((rows, half), random)
        order = torch.randperm(2 * half, generator=random)
        weight, x = weight.to(like.dtype), x.to(like.dtype)
        both = torch.zeros(weight.shape[0], columns, dtype=like.dtype)
        both[:, order] = torch.cat([weight, -weight], 1)
        self.rows = torch.zeros(rows, columns, dtype=like.dtype)  # the rows of x, at most
        self.rows[:, order] = torch.cat([x, x], 1)
        self.rows = self.rows.to(like.device)
        whole = both.to(like.device).repeat(-(-outputs // both.shape[0]), 1)[:outputs]
        self.product = make(whole)

    def agrees(self, rows: int, reference: int) -> bool:
        """Return whether products of `rows` and of `reference` rows give their shared rows the same bits."""
        shared = min(rows, reference)
        # the shared rows come last, among other neighbours
        moved = self.product(self.rows.roll(rows - shared, 0)[:rows])[rows - shared :]
        return torch.equal(moved, self.product(self.rows[:reference])[:shared])


class AttentionProbe:
    """Attention of one row whose scores are rounding errors, and so is half of its output.

    Every query cancels against every key. Keys come in equal pairs whose values are opposite in the first
    half of the channels; the other half shows the scores.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context: int,  # positions before the first query
        queries: int,  # the queries, at most
        like: Tensor,  # a tensor of the device and dtype
        random: torch.Generator,  # the source of values
        blocked: bool = False,  # store keys in the layout of the C kernels
        most: tuple[int, int] = (8, 4096),  # the rows of a batch and the attended positions, at most
        window: int | None = None,  # the probed heads are those of layers with this window
    ) -> None:
        self.spec = spec = spec.plain_layer(window)  # the model
        self.context, self.queries = context, queries
        heads, dim, half = spec.kv_heads, spec.head_dim, spec.head_dim // 2
        stored = context + queries
        order = torch.randperm(dim, generator=random)
        # queries and keys share the inverse of the scale, because float16 ends at 65504
        amplitude = AMPLITUDE / spec.attention_scale**0.5
        q = _normal((1, heads, queries * spec.groups, half), random) * amplitude
        k = _normal((1, heads, stored, half), random) * amplitude
        v = _normal((1, heads, stored, dim), random)
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
        self.cache = KVCache(self.spec, *most, device=like.device, dtype=like.dtype, slack=0, blocked=blocked)

    def output(self, batch: int, queries: int, length: int, place: int, scale: float, apart: bool) -> Tensor:
        """Return the attention output of the probed row by PyTorch operators, [T, Hk, G, D]."""
        self.fill(batch, length, place, scale)
        k, v = self.cache.read(0, 0, batch, length)
        q, groups = self.queries_of(batch, queries, place), self.spec.groups
        starts = torch.tensor([max(0, self.context - 7 * abs(row - place)) for row in range(batch)])
        positions = starts.to(q.device)[:, None] + torch.arange(queries, device=q.device)
        mask = causal_masks(self.spec, positions, length, q.dtype)[None]
        out = masked_attention(self.spec, q, k, v, mask, apart)[place]  # [Hk, T * G, D]
        return out.view(-1, queries, groups, out.shape[-1]).transpose(0, 1)

    def fill(self, batch: int, length: int, place: int, scale: float) -> None:
        """Fill the cache with garbage and, in the row `place`, with the keys and values of the probed row."""
        noise = self.noise[0].repeat(1, length // 1024 + 1, 1)[:, :length] * scale  # [Hk, L, D]
        for row in range(batch):
            self.cache.write(0, row, 0, noise, noise)
        self.cache.write(0, place, 0, self.k[0], self.v[0])

    def queries_of(self, batch: int, queries: int, place: int) -> Tensor:
        """Return the queries of a batch with the probed row at `place`, [B, Hk, T * G, D]."""
        count = queries * self.spec.groups
        q = self.q[:, :, :count].flip(2).repeat(batch, 1, 1, 1)
        q[place] = self.q[0, :, :count]
        return q


def _normal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random)
