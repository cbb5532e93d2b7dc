"""Grouped-query attention over the KV cache, with causal and sliding-window masks.

Contract: a `ForwardContext` holds everything that attention needs besides queries, keys and values. Query
heads that share a key head are folded into the query axis, so keys are read once and never expanded. The
query at position i sees the keys at positions up to i and, in a layer with window w, only the last w of them.

Soft-capped scores (Gemma 2, arXiv:2408.00118) are computed step by step; all others use PyTorch's
`scaled_dot_product_attention`. On CPUs the weighted sum of soft-capped attention is taken in pieces of a
fixed number of positions: BLAS cuts a sum over L positions into blocks that depend on L, and so do its last
bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention_choice import pinned_attention
from foredraft.model.forward_context import ForwardContext, Rotation, at_columns
from foredraft.model.layers import soft_cap
from foredraft.model.spec import ModelSpec

PIECE = 256  # positions of one product in a weighted sum; attended lengths are multiples of it


def attend(spec: ModelSpec, layer: int, qkv: Tensor, context: ForwardContext) -> Tensor:
    """Rotate queries and keys, store keys and values in the cache, and attend.

    Args:
        spec: The model.
        layer: The index of the layer.
        qkv: Queries, keys and values, [N, H + 2 * Hk, D], or the queries alone of a layer that reads the keys
            and values of another; queries and keys are rotated in place.
        context: What all layers of the pass share.

    Returns:
        The output of all heads, [N, H * D].
    """
    shape, window = context.shape, spec.windows[layer]
    heads, kv_heads, dim = spec.heads, spec.kv_heads_of(window), spec.head_dim_of(window)
    batch, queries, groups = shape.batch, shape.queries, spec.groups_of(window)
    if layer not in spec.unrotated:
        rotation = context.rotary[window]
        if context.query_rotary is None:
            _rotate(qkv[:, : heads + kv_heads], rotation)
        else:
            _rotate(qkv[:, :heads], context.query_rotary)
            _rotate(qkv[:, heads : heads + kv_heads], rotation)
    if spec.stores(layer):
        _store(qkv[:, heads:], layer, kv_heads, context, context.write[window])
    q = at_columns(qkv[:, :heads], context.real, batch * queries)
    q = q.view(batch, queries, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, queries * groups, dim)  # [B, Hk, T * G, D]
    k, v = context.cache.read(layer, shape.first_row, batch, shape.length)  # [B, Hk, L, D]
    out = masked_attention(spec, q, k, v, context.masks[window], shape.apart)
    out = out.view(batch, kv_heads, queries, groups, dim).permute(0, 2, 1, 3, 4)
    out = out.reshape(batch * queries, heads * dim)
    return out if context.real is None else out[context.real]


def inject(spec: ModelSpec, layer: int, kv: Tensor, context: ForwardContext) -> None:
    """Rotate keys and store them and their values in the cache, for later passes to attend to.

    Args:
        spec: The model.
        layer: The index of the layer.
        kv: Keys and values, [N, 2 * Hk, D]; keys are rotated in place.
        context: What all layers of the pass share.
    """
    window = spec.windows[layer]
    kv_heads = spec.kv_heads_of(window)
    if layer not in spec.unrotated:
        _rotate(kv[:, :kv_heads], context.rotary[window])
    _store(kv, layer, kv_heads, context, context.write[window])


def _rotate(x: Tensor, rotation: Rotation) -> None:
    """Rotate the first channels of heads [N, H, D] in place."""
    cos, sin = rotation  # [N, 1, R]
    rotated = cos.shape[-1]
    x = x[..., :rotated]
    torch.addcmul(x * cos, x.roll(rotated // 2, -1), sin, out=x)


def _store(kv: Tensor, layer: int, kv_heads: int, context: ForwardContext, write: Tensor | slice) -> None:
    """Store keys and values [N, 2 * Hk, D] in the cache."""
    store = context.cache.layer(layer)  # [2, R, Hk, P, D]
    if isinstance(write, slice):
        target = store[:, context.shape.first_row, :, write]  # [2, Hk, T, D]
        target.copy_(kv.view(context.shape.queries, 2, kv_heads, -1).permute(1, 2, 0, 3))
    else:
        store.view(-1, kv.shape[-1]).index_copy_(0, write, kv.reshape(-1, kv.shape[-1]))


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
        with pinned_attention(q.device):
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
