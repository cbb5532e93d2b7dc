"""Build the `Pass` of one forward: positions, rotary rows, masks and write indices, on the device.

Contract: the host reads no device value. The mask of a row depends on the row's start, never on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.attention import Pass, causal_masks
from foredraft.model.cache import CacheLayers
from foredraft.model.layers import RowSpan
from foredraft.model.rope import Rope, rope_table
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PassShape:
    """The part of a pass that does not depend on its inputs.

    Attributes:
        first_row: The cache row of row 0.
        batch: B.
        queries: T, padding included.
        length: L, the positions that are attended.
        span: The row counts at which products are exact; None allows any.
        apart: Attend row by row.
    """

    first_row: int
    batch: int
    queries: int
    length: int
    span: RowSpan | None
    apart: bool


def build_pass(
    spec: ModelSpec,
    tables: Mapping[Rope, Tensor],
    cache: CacheLayers,
    shape: PassShape,
    starts: Tensor | int,
    real: Tensor | None = None,
) -> Pass:
    """Return the pass of the columns at positions starts[b] + t.

    Args:
        spec: The model.
        tables: The rotary tables, [P, 2, D] each.
        cache: The KV cache.
        shape: The shape of the pass.
        starts: The position of each row's first column, [B], or the number of a single row.
        real: The columns b * T + t that a ragged pass computes, [N]; None computes all.
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
    """Return the rotary table [P, 2, D] of every rope that a layer of the model uses."""
    ropes = dict.fromkeys(spec.rope_of(window) for window in spec.windows)
    return {rope: rope_table(rope, spec.head_dim, positions, device, dtype) for rope in ropes}


def _lanes(cache: CacheLayers, kv_heads: int, positions: Tensor, first_row: int) -> Tensor:
    """Return where the keys and values of every column go in a layer [2 * R * Hk * P, D]: [B * T, 2 * Hk]."""
    batch = positions.shape[0]
    heads = torch.arange(kv_heads, device=positions.device)
    rows = torch.arange(first_row, first_row + batch, device=positions.device)
    lanes = (rows[:, None] * kv_heads + heads) * cache.stored  # [B, Hk]
    pair = torch.stack([lanes, lanes + cache.rows * kv_heads * cache.stored], 1)  # [B, 2, Hk]
    return (positions[:, :, None, None] + pair[:, None]).flatten(0, 1).flatten(1)
