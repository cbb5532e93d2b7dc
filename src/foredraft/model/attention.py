"""Attention over the cache, and the masks that make it causal and windowed.

Contract: everything that a pass needs besides weights is one frozen `Pass`; nothing is computed twice for two
layers. Query heads that share a key head are folded into the query axis, so keys are read once and never
copied. A position's key is visible from its own position on and, in a layer with window w, from the w - 1
after it.

Soft-capped scores (Gemma 2, arXiv:2408.00118) need the explicit form; all others use PyTorch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.layers import RowSpan, soft_cap
from foredraft.model.spec import ModelSpec

Rotation = tuple[Tensor, ...]  # cosines, and sines signed for the rolled half: [N, 1, D] each


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward of B rows by T queries, as its layers see it: N = B * T columns, or the real ones."""

    cache: KVCache
    first_row: int
    batch: int  # B
    queries: int  # T
    length: int  # L, the attended length
    rotary: Mapping[int | None, Rotation]  # window -> rotation of every column
    masks: Mapping[int | None, Tensor]  # window -> [B, 1, T * G, L], 0 or -inf
    write: Tensor | slice  # flat indices of k and v in a layer, or the position slice of a single row
    real: Tensor | None  # [N] the columns b * T + t that are computed; None = all
    span: RowSpan | None  # row counts of exact products; None = any
    apart: bool  # attend row by row: the kernels' bits depend on the batch


def causal_masks(
    spec: ModelSpec, positions: Tensor, length: int, dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """The masks of a pass, one for each different window.

    Positions past the attended length (padding, idle rows) count as its last: every query sees at least one
    key, for a row of -inf would become NaN, and NaN in the cache would outlive the pass.
    """
    keys = torch.arange(length, device=positions.device)
    last = positions.clamp(max=length - 1)[:, :, None]  # [B, T, 1]
    causal = keys <= last  # [B, T, L]
    built: dict[int | None, Tensor] = {}
    masks: dict[int | None, Tensor] = {}
    for window in dict.fromkeys(spec.windows):
        hides = None if window is None or window >= length else window  # a window that hides no key is none
        if hides not in built:
            visible = causal if hides is None else causal & (keys > last - hides)
            built[hides] = _additive(visible, spec.groups, dtype)
        masks[window] = built[hides]
    return masks


def _additive(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
    batch, queries, length = mask.shape
    folded = mask[:, :, None].expand(batch, queries, groups, length)
    return folded.reshape(batch, 1, queries * groups, length)  # [B, 1, T * G, L]


def attend(spec: ModelSpec, layer: int, qkv: Tensor, pass_: Pass) -> Tensor:
    """Rotate, store keys and values, attend: qkv [N, H + 2 * Hk, D] -> [N, H * D]."""
    heads, kv_heads, dim, groups = spec.heads, spec.kv_heads, spec.head_dim, spec.groups
    batch, queries, window = pass_.batch, pass_.queries, spec.windows[layer]
    cos, sin = pass_.rotary[window]
    qk = qkv[:, : heads + kv_heads]
    torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin, out=qk)
    _store(qkv[:, heads:], layer, kv_heads, pass_)
    q = qkv[:, :heads]
    if pass_.real is not None:  # queries of zero where nothing is real
        q = q.new_zeros(batch * queries, heads, dim).index_copy_(0, pass_.real, q)
    q = q.view(batch, queries, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, queries * groups, dim)  # [B, Hk, T * G, D]
    k, v = pass_.cache.read(layer, pass_.first_row, batch, pass_.length)  # [B, Hk, L, D]
    out = mix(spec, q, k, v, pass_.masks[window], pass_.apart)
    out = out.view(batch, kv_heads, queries, groups, dim).permute(0, 2, 1, 3, 4)
    out = out.reshape(batch * queries, heads * dim)
    return out if pass_.real is None else out[pass_.real]


def _store(kv: Tensor, layer: int, kv_heads: int, pass_: Pass) -> None:
    """Write keys and values [N, 2 * Hk, D] at their positions."""
    store = pass_.cache.data[layer]  # [2, R, Hk, P, D]
    if isinstance(pass_.write, slice):
        target = store[:, pass_.first_row, :, pass_.write]  # [2, Hk, T, D]
        target.copy_(kv.view(pass_.queries, 2, kv_heads, -1).permute(1, 2, 0, 3))
    else:
        store.view(-1, kv.shape[-1]).index_copy_(0, pass_.write, kv.reshape(-1, kv.shape[-1]))


def mix(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, apart: bool) -> Tensor:
    """softmax(q k + mask) v: [B, Hk, T * G, D]; `apart` computes each row of the batch by itself."""
    if apart and q.shape[0] > 1:
        rows = [slice(b, b + 1) for b in range(q.shape[0])]
        return torch.cat([_mixed(spec, q[row], k[row], v[row], mask[row]) for row in rows])
    return _mixed(spec, q, k, v, mask)


def _mixed(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    batch, kv_heads, rows, _ = q.shape
    if spec.attention_softcap is None:
        if rows == 1 and q.device.type == "cpu" and q.dtype != torch.float32:
            # PyTorch's CPU kernel takes up to three times as long for one bfloat16 query as for two
            q, mask = torch.cat([q, q], 2), torch.cat([mask, mask], 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.attention_scale)
        return out[:, :, :rows]
    # flattening [B, Hk] keeps a view on the cache, where a four-dimensional matmul would copy it
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, kv_heads, rows, -1)
    scores = soft_cap(scores, spec.attention_softcap, spec.attention_scale).add_(mask)  # [B, Hk, T * G, L]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(batch, kv_heads, rows, -1)
