"""Grouped-query attention over the KV cache, with causal and sliding-window masks.

Contract: a frozen `Pass` holds everything that a forward needs besides the weights; rotations and masks are
computed once per pass, not once per layer. Query heads that share a key head are folded into the query axis,
so keys are read once and never expanded. The query at position i sees the keys at positions up to i and, in a
layer with window w, only the last w of them.

Soft-capped scores (Gemma 2, arXiv:2408.00118) are computed step by step; all others use PyTorch's
`scaled_dot_product_attention`. On CPUs the weighted sum of soft-capped attention is taken in pieces of a
fixed number of positions: BLAS cuts a sum over L positions into blocks that depend on L, and so do its last
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.layers import RowSpan, soft_cap
from foredraft.model.spec import ModelSpec

PIECE = 256  # positions of one product in a weighted sum; attended lengths are multiples of it
Rotation = tuple[Tensor, ...]  # cosines and signed sines of every column, [N, 1, D] each


@dataclass(frozen=True, slots=True)
class Pass:
    """The inputs of one forward that all its layers share.

    The forward has B rows of T queries. It computes N columns: all B * T, or only the `real` ones of a ragged
    batch.

    Attributes:
        cache: The cache that holds the keys and values.
        first_row: The first of the B cache rows.
        batch: B.
        queries: T.
        length: L, the positions that are attended.
        rotary: The rotation of every column, by the window of the layer.
        masks: The additive mask [B, 1, T * G, L] of 0 and -inf, by the window of the layer.
        write: Where a layer stores keys and values: flat indices, or the slice of positions of a single row.
        real: The columns b * T + t that are computed, [N]; None computes all.
        span: The row counts at which products are exact; None allows any.
        apart: Attend row by row, because the attention kernel's bits depend on the batch size.
    """

    cache: CacheLayers
    first_row: int
    batch: int
    queries: int
    length: int
    rotary: Mapping[int | None, Rotation]
    masks: Mapping[int | None, Tensor]
    write: Tensor | slice
    real: Tensor | None
    span: RowSpan | None
    apart: bool


def causal_masks(
    spec: ModelSpec, positions: Tensor, length: int, dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """Return the additive attention masks of a pass, one per distinct window.

    A query past the attended length (padding, an idle row) is treated as the last position. So every query
    sees at least one key: the softmax of a row of -inf would be NaN, and NaN in the cache outlives the pass.

    Args:
        spec: The model.
        positions: The position of every query, [B, T].
        length: L, the positions that are attended.
        dtype: The dtype of the masks.

    Returns:
        Masks [B, 1, T * G, L] of 0 and -inf, by window; None is the window of full attention.
    """
    keys = torch.arange(length, device=positions.device)
    last = positions.clamp(max=length - 1)[:, :, None]  # [B, T, 1]
    causal = keys <= last  # [B, T, L]
    built: dict[int | None, Tensor] = {}
    masks: dict[int | None, Tensor] = {}
    for window in dict.fromkeys(spec.windows):
        reach = None if window is None or window >= length else window  # a window that hides no key is none
        if reach not in built:
            visible = causal if reach is None else causal & (keys > last - reach)
            built[reach] = _additive(visible, spec.groups, dtype)
        masks[window] = built[reach]
    return masks


def _additive(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Turn visibility [B, T, L] into an additive mask for folded query heads."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
    batch, queries, length = mask.shape
    folded = mask[:, :, None].expand(batch, queries, groups, length)
    return folded.reshape(batch, 1, queries * groups, length)  # [B, 1, T * G, L]


def attend(spec: ModelSpec, layer: int, qkv: Tensor, pass_: Pass) -> Tensor:
    """Rotate queries and keys, store keys and values in the cache, and attend.

    Args:
        spec: The model.
        layer: The index of the layer.
        qkv: Queries, keys and values, [N, H + 2 * Hk, D]; queries and keys are rotated in place.
        pass_: The shared inputs of the forward.

    Returns:
        The output of all heads, [N, H * D].
    """
    heads, kv_heads, dim, groups = spec.heads, spec.kv_heads, spec.head_dim, spec.groups
    batch, queries, window = pass_.batch, pass_.queries, spec.windows[layer]
    cos, sin = pass_.rotary[window]
    qk = qkv[:, : heads + kv_heads]
    torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin, out=qk)
    _store(qkv[:, heads:], layer, kv_heads, pass_)
    q = qkv[:, :heads]
    if pass_.real is not None:  # scatter into [B * T]; the other queries are zero
        q = q.new_zeros(batch * queries, heads, dim).index_copy_(0, pass_.real, q)
    q = q.view(batch, queries, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, queries * groups, dim)  # [B, Hk, T * G, D]
    k, v = pass_.cache.read(layer, pass_.first_row, batch, pass_.length)  # [B, Hk, L, D]
    out = masked_attention(spec, q, k, v, pass_.masks[window], pass_.apart)
    out = out.view(batch, kv_heads, queries, groups, dim).permute(0, 2, 1, 3, 4)
    out = out.reshape(batch * queries, heads * dim)
    return out if pass_.real is None else out[pass_.real]


def _store(kv: Tensor, layer: int, kv_heads: int, pass_: Pass) -> None:
    """Store keys and values [N, 2 * Hk, D] in the cache."""
    store = pass_.cache.layer(layer)  # [2, R, Hk, P, D]
    if isinstance(pass_.write, slice):
        target = store[:, pass_.first_row, :, pass_.write]  # [2, Hk, T, D]
        target.copy_(kv.view(pass_.queries, 2, kv_heads, -1).permute(1, 2, 0, 3))
    else:
        store.view(-1, kv.shape[-1]).index_copy_(0, pass_.write, kv.reshape(-1, kv.shape[-1]))


def masked_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, apart: bool) -> Tensor:
    """Return softmax(scale * q k^T + mask) v, soft-capped where the model is.

    Args:
        spec: The model, for its scale and soft-cap.
        q: Queries, [B, Hk, T * G, D].
        k: Keys, [B, Hk, L, D].
        v: Values, [B, Hk, L, D].
        mask: Additive mask, [B, 1, T * G, L].
        apart: Compute each row of the batch in a call of its own.

    Returns:
        The attention output, [B, Hk, T * G, D].
    """
    if apart and q.shape[0] > 1:
        rows = [slice(b, b + 1) for b in range(q.shape[0])]
        return torch.cat([_batch_attention(spec, q[row], k[row], v[row], mask[row]) for row in rows])
    return _batch_attention(spec, q, k, v, mask)


def _batch_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batch, kv_heads, rows, _ = q.shape
    if spec.attention_softcap is None:
        if rows == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
            # PyTorch's CPU kernel takes up to three times as long for one half-precision query as for two
            q, mask = torch.cat([q, q], 2), torch.cat([mask, mask], 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.attention_scale)
        return out[:, :, :rows]
    # bmm over flattened [B, Hk] reads the cache in place; a four-dimensional matmul would copy it
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, kv_heads, rows, -1)
    scores = soft_cap(scores, spec.attention_softcap, spec.attention_scale).add_(mask)  # [B, Hk, T * G, L]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return _weighted_sum(weights.flatten(0, 1), v.flatten(0, 1)).view(batch, kv_heads, rows, -1)


def _weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights [N, T, L] times v [N, L, D].

    On CPUs its bits do not depend on how far L reaches past the last weight.
    """
    length = v.shape[1]
    if v.device.type != "cpu" or length <= PIECE:
        return torch.bmm(weights, v)
    total = torch.bmm(weights[:, :, :PIECE], v[:, :PIECE]).float()
    for start in range(PIECE, length, PIECE):
        total += torch.bmm(weights[:, :, start : start + PIECE], v[:, start : start + PIECE])
    return total.to(v.dtype)
