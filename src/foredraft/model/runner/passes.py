"""Building the `Pass` of one forward: positions, rotary rows, masks and write indices on the device.

Contract: no device value is read by the host; everything is decided from the host's list of starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foredraft.model.attention import Pass, causal_masks
from foredraft.model.cache import KVCache
from foredraft.model.device import upload
from foredraft.model.layers import RowSpan
from foredraft.model.rope import Rope, rope_table
from foredraft.model.spec import ModelSpec


def build_pass(
    spec: ModelSpec,
    tables: Mapping[Rope, Tensor],
    cache: KVCache,
    starts: list[int],
    queries: int,
    length: int,
    *,
    first_row: int,
    span: RowSpan | None,
    apart: bool,
) -> Pass:
    """The pass of `queries` columns at positions `starts[b] + t`, attending to `length` positions; `tables`
    are the rotary tables [P, 2, D]."""
    device = cache.data.device
    batch = len(starts)
    columns = torch.arange(queries, device=device)
    if batch == 1:
        positions = (columns + starts[0])[None]  # [1, T]
        rows: Tensor | slice = slice(starts[0], starts[0] + queries)  # of the rotary tables
        write: Tensor | slice = slice(starts[0], starts[0] + queries)
    else:
        positions = upload(starts, device)[:, None] + columns  # [B, T]
        rows = positions.view(-1)
        write = _flat_indices(cache, spec.kv_heads, positions, first_row)
    rotations = {rope: table[rows].chunk(2, 1) for rope, table in tables.items()}
    return Pass(
        cache=cache,
        first_row=first_row,
        batch=batch,
        queries=queries,
        length=length,
        rotary={window: rotations[spec.rope_of(window)] for window in dict.fromkeys(spec.windows)},
        masks=causal_masks(spec, positions, length, max(starts) + queries, cache.data.dtype),
        write=write,
        span=span,
        apart=apart,
    )


def rope_tables(
    spec: ModelSpec, positions: int, device: torch.device, dtype: torch.dtype
) -> dict[Rope, Tensor]:
    """The rotary tables of every kind of layer, [P, 2, D] each."""
    ropes = dict.fromkeys(spec.rope_of(window) for window in spec.windows)
    return {rope: rope_table(rope, spec.head_dim, positions, device, dtype) for rope in ropes}


def _flat_indices(cache: KVCache, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """Where k and v of every column go in a layer seen as [2 * R * Hk * P, D], in the order [B, T, 2, Hk]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).view(-1)
