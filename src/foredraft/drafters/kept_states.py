"""Kept states: those of the target that a drafter reads again, in the rows of a cache.

Contract: they are addressed by absolute position, and follow the batch's rows as keys and values do, so that
a text may be cut, copied or parked anywhere. One half of a state lies where keys would, the other where
values would. The cache keeps positions in order, never in blocks.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from foredraft.model.cache import KVCache
from foredraft.model.spec import ModelSpec

__all__ = ["keep", "kept", "states_spec"]


def states_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """Return the spec of a cache that holds one state of a size at each position."""
    return replace(spec.plain_layer(), heads=1, kv_heads=1, head_dim=size // 2)


def keep(cache: KVCache, row: int, start: int, states: Tensor) -> None:
    """Store states [n, D] of one row at the positions from `start` on, with which the row ends."""
    one, other = states.view(len(states), 1, 2, -1).permute(2, 1, 0, 3)  # [1, n, D / 2] each
    cache.write(0, row, start, one, other)
    cache.lengths[row] = start + len(states)


def kept(cache: KVCache, rows: int | Tensor, positions: slice | Tensor) -> Tensor:
    """Return the states [n, D] at the positions [n] of a row, or each of a row of its own [n]."""
    return cache.layer(0)[:, rows, 0, positions].transpose(0, 1).flatten(1)
