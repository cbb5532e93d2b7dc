"""Building the `Pass` of one forward: positions, rotary rows, masks and write indices on the device.

Contract: no device value is read by the host; everything is decided from the host's list of starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.attention import Pass, causal_masks
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.layers import RowSpan
from foredraft.model.spec import ModelSpec


def build_pass(
    spec: ModelSpec,
    table: Tensor,
    cache: KVCache,
    starts: list[int],
    queries: int,
    length: int,
    *,
    first_row: int,
    span: RowSpan | None,
    apart: bool,
) -> Pass:
    """The pass of `queries` columns at positions `starts[b] + t`, attending to `length` positions; `table` is
    the rotary table [P, 2, D]."""
    device = table.device
    batch = len(starts)
    columns = torch.arange(queries, device=device)
    if batch == 1:
        positions = (columns + starts[0])[None]  # [1, T]
        rotary = table[starts[0] : starts[0] + queries]  # [T, 2, D]
        write: Tensor | slice = slice(starts[0], starts[0] + queries)
    else:
        positions = upload(starts, device)[:, None] + columns  # [B, T]
        rotary = table[positions.view(-1)]  # [B * T, 2, D]
        write = _flat_indices(cache, spec.kv_heads, positions, first_row)
    return Pass(
        cache=cache,
        first_row=first_row,
        batch=batch,
        queries=queries,
        length=length,
        cos=rotary[:, :1],
        sin=rotary[:, 1:],
        masks=causal_masks(spec, positions, length, max(starts) + queries, cache.data.dtype),
        write=write,
        span=span,
        apart=apart,
    )


def _flat_indices(cache: KVCache, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """Where k and v of every column go in a layer seen as [2 * R * Hk * P, D], in the order [B, T, 2, Hk]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).view(-1)
