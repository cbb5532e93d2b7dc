"""Building the `Pass` of one forward: positions, rotary rows, masks and write indices on the device.

Contract: no device value is read by the host. The masks are each row's own: they follow from where the row
starts, never from its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.attention import Pass, causal_masks
from foredraft.model.cache import KVCache
from foredraft.model.layers import RowSpan
from foredraft.model.rope import Rope, rope_table
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PassShape:
    """What is fixed of a pass, whatever it is over."""

    first_row: int
    batch: int  # B
    queries: int  # T, padding included
    length: int  # L, attended
    span: RowSpan | None
    apart: bool


def build_pass(
    spec: ModelSpec,
    tables: Mapping[Rope, Tensor],
    cache: KVCache,
    shape: PassShape,
    starts: Tensor | int,
    real: Tensor | None = None,
) -> Pass:
    """The pass of `queries` columns at positions starts[b] + t, of all of them or of the `real` ones [N].

    `tables` are the rotary tables [P, 2, D]. A single row's start may be a number.
    """
    columns = torch.arange(shape.queries, device=cache.device)
    if isinstance(starts, int):
        positions = (columns + starts)[None]  # [1, T]
        rows: Tensor | slice = slice(starts, starts + shape.queries)  # of the rotary tables
        write: Tensor | slice = rows
    else:
        positions = starts[:, None] + columns  # [B, T]
        rows = positions.view(-1)
        lanes = _lanes(cache, spec.kv_heads, positions, shape.first_row)
        if real is not None:
            rows, lanes = rows[real], lanes[real]
        write = lanes.view(-1)
    rotations = {rope: table[rows].chunk(2, 1) for rope, table in tables.items()}
    return Pass(
        cache=cache,
        first_row=shape.first_row,
        batch=shape.batch,
        queries=shape.queries,
        length=shape.length,
        rotary={window: rotations[spec.rope_of(window)] for window in dict.fromkeys(spec.windows)},
        masks=causal_masks(spec, positions, shape.length, cache.dtype),
        write=write,
        real=real,
        span=shape.span,
        apart=shape.apart,
    )


def rope_tables(
    spec: ModelSpec, positions: int, device: torch.device, dtype: torch.dtype
) -> dict[Rope, Tensor]:
    """The rotary tables of every kind of layer, [P, 2, D] each."""
    ropes = dict.fromkeys(spec.rope_of(window) for window in spec.windows)
    return {rope: rope_table(rope, spec.head_dim, positions, device, dtype) for rope in ropes}


def _lanes(cache: KVCache, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """[B * T, 2 * Hk]: where k and v of every column go in a layer seen as [2 * R * Hk * P, D]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).flatten(0, 1).flatten(1)
