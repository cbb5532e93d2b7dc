"""Keys and values of every sequence: rows x positions, addressed by absolute position.

Contract: rollback is setting a length, on models with sliding windows too, because windows live in the mask
(docs/architecture.md). What lies past a length must be finite garbage, since no mask hides NaN: the store
starts zeroed, and who sees values that are not finite wipes or zeroes the row. The owner of the sequences
sets `lengths`, at commit only; nothing here or in a forward does.

Past the `positions` that a row may use lie `slack` positions that the padding of its longest pass may
overwrite, and `slack` more, from `scratch` on, where idle rows of a batch write.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foredraft.model.spec import ModelSpec

QUANTUM = 1024  # rows hold a multiple of this many positions: any attended length can be padded to its bucket
SLACK = 256


def _stored(positions: int, slack: int) -> int:
    return math.ceil((positions + 2 * slack) / QUANTUM) * QUANTUM


class KVCache:
    """The store of one decoder; the run state of its forwards."""

    def __init__(
        self,
        spec: ModelSpec,
        rows: int,
        positions: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        slack: int = SLACK,
    ) -> None:
        self.rows = rows
        self.positions = positions
        self.slack = slack
        self.scratch = positions + slack
        self.stored = _stored(positions, slack)
        self.lengths = [0] * rows
        self.data = torch.zeros(
            (spec.layers, 2, rows, spec.kv_heads, self.stored, spec.head_dim), device=device, dtype=dtype
        )  # [layers, k|v, R, H, P, D]

    def read(self, layer: int, first_row: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` rows, views on the store: two times [B, H, L, D]."""
        k, v = self.data[layer, :, first_row : first_row + count, :, :length].unbind(0)
        return k, v

    def copy_row(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Make `target` hold the first `length` positions of `source`; it holds `start` of them already."""
        if source != target:
            self.data[:, :, target, :, start:length] = self.data[:, :, source, :, start:length]
        self.lengths[target] = length

    def wipe(self, row: int, length: int) -> None:
        """Zero what lies past the first `length` positions."""
        self.data[:, :, row, :, length:] = 0

    def zero_row(self, row: int) -> None:
        """Forget a row, its garbage too."""
        self.wipe(row, 0)
        self.lengths[row] = 0

    @staticmethod
    def bytes_per_row(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """What one row of a cache with that many usable positions takes."""
        values = 2 * spec.layers * spec.kv_heads * spec.head_dim * _stored(positions, SLACK)
        return values * dtype.itemsize
