"""Keys and values of every sequence: rows x positions, addressed by absolute position.

Contract: rollback is setting a length, on models with sliding windows too, because windows live in the mask
(docs/architecture.md). What lies past a length must be finite garbage, since no mask hides NaN: the store
starts zeroed, and who sees values that are not finite wipes or zeroes the row. The owner of the sequences
sets `lengths`, at commit only; nothing here or in a forward does.

Values lie one position after the other. So do keys, for PyTorch's operators; the kernels want them in blocks
of 32 positions, [D / word, 32, word] each, a word being one float or two bfloat16. Only this module and the
kernels know: everybody else reads, writes, copies and wipes positions.

Past the `positions` that a row may use lie `slack` positions that the padding of its longest pass may
overwrite, and `slack` more, from `scratch` on, where idle rows of a batch write.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foredraft.kernels import pages
from foredraft.model.spec import ModelSpec

QUANTUM = 1024  # rows hold a multiple of this many positions: any attended length can be padded to its bucket
SLACK = 256
BLOCK = 32  # positions of a block of keys


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
        blocked: bool = False,
    ) -> None:
        """blocked: keys lie as the kernels want them."""
        self.rows = rows
        self.positions = positions
        self.slack = slack
        self.scratch = positions + slack
        self.stored = _stored(positions, slack)
        self.lengths = [0] * rows
        self.device, self.dtype = device, dtype
        self.blocked = blocked
        shape = (spec.layers, 2, rows, spec.kv_heads, self.stored, spec.head_dim)
        self.memory = pages.zeros(shape, dtype, device)  # all of it, for the kernels
        self._keys, self._values = self.memory.unbind(1)  # [layers, R, H, P, D] each
        if blocked:
            word = 4 // dtype.itemsize
            blocks = (*shape[2:4], self.stored // BLOCK, spec.head_dim // word, BLOCK, word)
            self._keys = self._keys.view(spec.layers, *blocks)  # [layers, R, H, P / 32, D / word, 32, word]

    @property
    def data(self) -> Tensor:
        """[layers, k|v, R, H, P, D], where keys lie one position after the other."""
        assert not self.blocked, "keys in blocks have no such view"
        return self.memory

    def read(self, layer: int, first_row: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` rows, two times [B, H, L, D]: views on the store, or copies of keys in
        blocks."""
        rows = slice(first_row, first_row + count)
        keys, values = self._keys[layer, rows], self._values[layer, rows, :, :length]
        if self.blocked:
            blocks = keys[:, :, : math.ceil(length / BLOCK)]  # [B, H, L / 32, D / word, 32, word]
            keys = blocks.transpose(3, 4).flatten(4).flatten(2, 3)
        return keys[:, :, :length], values

    def write(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values [H, T, D] of the positions from `start` on."""
        stop = start + keys.shape[1]
        self._values[layer, row, :, start:stop] = values
        if not self.blocked:
            self._keys[layer, row, :, start:stop] = keys
            return
        positions = torch.arange(start, stop, device=self.device)
        word = self._keys.shape[-1]
        words = keys.to(self.dtype).reshape(*keys.shape[:2], -1, word)  # [H, T, D / word, word]
        self._keys[layer, row][:, positions // BLOCK, :, positions % BLOCK] = words.transpose(0, 1)

    def copy_row(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Make `target` hold the first `length` positions of `source`; it holds `start` of them already."""
        if source != target:
            held = self._parted(source, length, start)[0]
            for one, other in zip(held, self._parted(target, length, start)[0], strict=True):
                other.copy_(one)
        self.lengths[target] = length

    def wipe(self, row: int, length: int) -> None:
        """Zero what lies past the first `length` positions."""
        for past in self._parted(row, length)[1]:
            past.zero_()

    def _parted(self, row: int, length: int, start: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        """A row's keys and values, as views: of the first `length` positions, and of those past them. Of the
        first, those before `start` may be left out."""
        keys, values = self._keys[:, row], self._values[:, row]
        held, past = [values[:, :, start:length]], [values[:, :, length:]]
        whole, some = divmod(length, BLOCK) if self.blocked else (length, 0)
        if some:
            parted = keys[:, :, whole]  # [layers, H, D / word, 32, word]
            held.append(parted[:, :, :, :some])
            past.append(parted[:, :, :, some:])
        held.append(keys[:, :, start // BLOCK if self.blocked else start : whole])
        past.append(keys[:, :, whole + bool(some) :])
        return held, past

    def zero_row(self, row: int) -> None:
        """Forget a row, its garbage too."""
        self.wipe(row, 0)
        self.lengths[row] = 0

    @staticmethod
    def bytes_per_row(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """What one row of a cache with that many usable positions takes."""
        values = 2 * spec.layers * spec.kv_heads * spec.head_dim * _stored(positions, SLACK)
        return values * dtype.itemsize
