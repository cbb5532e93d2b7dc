"""Grouped-query attention over the KV cache, and the context of a pass: rotations, masks and places of
writing.

A `PassShape` decides which operators run on which shapes, so a pass can be captured once per shape;
`PassInputs` hold the rest. The host reads no device value, and the mask of a row depends on the row's start,
never on the batch. Of each of B rows the caller asks for T *columns*, which are positions; with their padding
they are T' *queries*. A ragged pass computes the N real ones alone.

Query heads that share a key head are folded into the query axis, so keys are read once. cuDNN's kernels are
left out (`PINNED`), since no self-check holds in another thread. Soft-capped scores (Gemma 2,
arXiv:2408.00118) are computed step by step; on CPUs in pieces of a fixed number of positions, because BLAS
cuts a sum by its length.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.cache import CacheLayers
from foredraft.model.layers import RowSpan, soft_cap
from foredraft.model.recurrent import Run
from foredraft.model.rope import Rope, rope_table
from foredraft.model.spec import ModelSpec, Plan

Rotation = tuple[Tensor, ...]  # cosines and signed sines of every column, [N, 1, R] each


@dataclass(frozen=True, slots=True)
class PassShape:
    """The key of all passes that run the same operators on the same shapes."""

    first_row: int  # the cache row of row 0
    batch: int  # B
    columns: int  # T, the columns of a row that the caller asks for
    queries: int  # T', the columns of a row with their padding
    length: int  # L, the positions that are attended
    span: RowSpan | None  # the row counts at which products are batch-invariant; None allows any
    apart: bool  # attend row by row, because the attention kernel's bits depend on the batch size
    plan: Plan  # the sub-layers that run
    start: int  # the first layer
    stop: int  # the layer after the last
    aux_layers: tuple[int, ...] = ()  # the depths whose entering states are returned
    head: bool = False  # compute logits


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The values in which passes of one shape differ."""

    starts: Tensor | int  # of each row's first column, [B]; a number for one row, because slices cost less
    tokens: Tensor | None  # token ids, [B, T]; None where `hidden` is given
    hidden: Tensor | None = None  # that enter the first layer, [B, T, D]; None: `tokens` are given
    real: Tensor | None = None  # the columns b * T' + t that a ragged pass computes, [N]; None computes all
    at: Tensor | None = None  # the column of each row whose logits are wanted, [B]; None wants all
    runs: tuple[Run, ...] | None = None  # the real columns of rows, where layers are recurrent


@dataclass(frozen=True, slots=True)
class ForwardContext:
    shape: PassShape  # the shape of the pass
    cache: CacheLayers  # the keys and values
    rotary: Mapping[int | None, Rotation]  # the rotation of every column, by the window of the layer
    masks: Mapping[int | None, Tensor]  # [B, 1, T' * G, L] of 0 and -inf, by window of the layer
    write: Mapping[int | None, Tensor | slice]  # by window; a slice of one row's positions, or flat indices
    real: Tensor | None  # the columns b * T' + t that a ragged pass computes, [N]; None computes all
    query_rotary: Rotation | None = None  # that of queries; None: they are rotated as keys are
    layer_inputs: Tensor | None = None  # of the tokens themselves, [N, layers, I]
    runs: Sequence[Run] | None = None  # the columns of rows, for recurrent layers


def build_context(
    spec: ModelSpec,
    tables: Mapping[Rope, Tensor],
    cache: CacheLayers,
    shape: PassShape,
    starts: Tensor | int,
    real: Tensor | None = None,
) -> ForwardContext:
    """Return the context of a pass over the columns at positions starts[b] + t, or over `real` [N] alone."""
    columns, windows = torch.arange(shape.queries, device=cache.device), dict.fromkeys(spec.windows)
    write: dict[int | None, Tensor | slice] = {}
    if isinstance(starts, int):
        positions = (columns + starts)[None]  # [1, T']
        rows: Tensor | slice = slice(starts, starts + shape.queries)  # of the rotary tables
        write = dict.fromkeys(windows, rows)
    else:
        positions = starts[:, None] + columns  # [B, T']
        rows = positions.view(-1)
        lanes = {
            heads: _lanes(cache, heads, positions, shape.first_row)
            for heads in dict.fromkeys(spec.kv_heads_of(window) for window in windows)
        }
        if real is not None:
            rows, lanes = rows[real], {heads: own[real] for heads, own in lanes.items()}
        write = {window: lanes[spec.kv_heads_of(window)].view(-1) for window in windows}
    rotations = {rope: table[rows].chunk(2, 1) for rope, table in tables.items()}
    rotary = {window: rotations[spec.rope_of(window)] for window in windows}
    masks = causal_masks(spec, positions, shape.length, cache.dtype)
    query_rotary = None if spec.query_rope is None else rotations[spec.query_rope]
    return ForwardContext(shape, cache, rotary, masks, write, real, query_rotary)


def at_columns(computed: Tensor, real: Tensor | None, count: int) -> Tensor:
    """Return columns [N, ...] at their places `real` [N] among `count`, zeros elsewhere; None: unchanged."""
    if real is None:
        return computed
    return computed.new_zeros(count, *computed.shape[1:]).index_copy_(0, real, computed)


def causal_masks(
    spec: ModelSpec, positions: Tensor, length: int, dtype: torch.dtype
) -> dict[int | None, Tensor]:
    """Return the additive attention masks of a pass over `positions` [B, T], one per distinct window.

    A query past the attended length (padding, an idle row) is treated as the last position, so every query
    sees a key: the softmax of a row of -inf would be NaN, and NaN in the cache outlives the pass.
    """
    keys = torch.arange(length, device=positions.device)
    last = positions.clamp(max=length - 1)[:, :, None]  # [B, T, 1]
    causal = keys <= last  # [B, T, L]
    built: dict[tuple[int | None, int], Tensor] = {}
    masks: dict[int | None, Tensor] = {}
    for window in dict.fromkeys(spec.windows):
        reach = None if window is None or window >= length else window  # a window that hides no key is none
        kind = reach, spec.groups_of(window)
        if kind not in built:
            visible = causal if reach is None else causal & (keys > last - reach)
            built[kind] = additive_mask(visible, spec.groups_of(window), dtype)
        masks[window] = built[kind]
    return masks


def additive_mask(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Turn visibility [B, T, L] into an additive mask for folded query heads."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask.masked_fill_(~visible, float("-inf"))
    batch, queries, length = mask.shape
    folded = mask[:, :, None].expand(batch, queries, groups, length)
    return folded.reshape(batch, 1, queries * groups, length)  # [B, 1, T * G, L]


def rope_tables(
    spec: ModelSpec, positions: int, device: torch.device, dtype: torch.dtype
) -> dict[Rope, Tensor]:
    """Return the rotary table [P, 2, R] of every rope that a layer of the model uses."""
    ahead = spec.rotated_ahead
    return {
        rope: rope_table(rope, dim, positions + ahead, device, dtype)[ahead:]
        for rope, dim in spec.ropes.items()
    }


def _lanes(cache: CacheLayers, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """Return where the keys and values of every column go in a layer [2 * R * Hk * P, D]: [B * T, 2 * Hk]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).flatten(0, 1).flatten(1)


class _Pinned:
    """Leaves cuDNN's kernels out, for several threads at a time; the last one restores the user's setting."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


PINNED = _Pinned()  # in which attention on a GPU takes the kernels that the self-check has tried


PIECE = 256  # positions of one product in a weighted sum; attended lengths are multiples of it


def attend(spec: ModelSpec, layer: int, qkv: Tensor, context: ForwardContext) -> Tensor:
    """Rotate queries and keys of `qkv` [N, H + 2 * Hk, D], store keys and values in the cache, and attend."""
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
        _store(qkv[:, heads : heads + 2 * kv_heads], layer, kv_heads, context, context.write[window])
    q = at_columns(qkv[:, :heads], context.real, batch * queries)
    q = q.view(batch, queries, kv_heads, groups, dim).permute(0, 2, 1, 3, 4)
    q = q.reshape(batch, kv_heads, queries * groups, dim)  # [B, Hk, T * G, D]
    k, v = context.cache.read(layer, shape.first_row, batch, shape.length)  # [B, Hk, L, D]
    out = masked_attention(spec, q, k, v, context.masks[window], shape.apart)
    out = out.view(batch, kv_heads, queries, groups, dim).permute(0, 2, 1, 3, 4)
    out = out.reshape(batch * queries, heads * dim)
    out = out if context.real is None else out[context.real]
    return out * torch.sigmoid(qkv[:, heads + 2 * kv_heads :]).flatten(1) if spec.gated_attention else out


def inject(spec: ModelSpec, layer: int, kv: Tensor, context: ForwardContext) -> None:
    """Rotate the keys of `kv` [N, 2 * Hk, D], and store keys and values for later passes to attend to."""
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
    store = context.cache.layer(layer)  # [2, R, Hk, P, D]
    if isinstance(write, slice):
        target = store[:, context.shape.first_row, :, write]  # [2, Hk, T, D]
        target.copy_(kv.view(context.shape.queries, 2, kv_heads, -1).permute(1, 2, 0, 3))
    else:
        store.view(-1, kv.shape[-1]).index_copy_(0, write, kv.reshape(-1, kv.shape[-1]))


def masked_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, apart: bool) -> Tensor:
    """Return softmax(scale q k^T + mask) v, if needed capped; q [B, Hk, T * G, D], k and v [B, Hk, L, D]."""
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
        with PINNED if q.device.type == "cuda" else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.attention_scale)
        return out[:, :, :rows]
    # bmm over flattened [B, Hk] reads the cache in place; a four-dimensional matmul would copy it
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(batch, kv_heads, rows, -1)
    scores = soft_cap(scores, spec.attention_softcap, spec.attention_scale).add_(mask)  # [B, Hk, T * G, L]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return _weighted_sum(weights.flatten(0, 1), v.flatten(0, 1)).view(batch, kv_heads, rows, -1)


def _weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Return weights [N, T, L] times v [N, L, D]; on CPUs in bits that no zero weight at the end changes."""
    length = v.shape[1]
    if v.device.type != "cpu" or length <= PIECE:
        return torch.bmm(weights, v)
    total = torch.bmm(weights[:, :, :PIECE], v[:, :PIECE]).float()
    for start in range(PIECE, length, PIECE):
        total += torch.bmm(weights[:, :, start : start + PIECE], v[:, start : start + PIECE])
    return total.to(v.dtype)
