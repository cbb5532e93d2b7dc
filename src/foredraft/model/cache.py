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
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kernels import huge_pages
from foredraft.model.spec import ModelSpec

QUANTUM = 1024  # rows hold a multiple of this many positions: any attended length can be padded to its bucket
SLACK = 256
BLOCK = 32  # positions of a block of keys


def _stored(positions: int, slack: int) -> int:
    return math.ceil((positions + 2 * slack) / QUANTUM) * QUANTUM


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of some of a row's positions, from `start` on, before `stop`; parts: as the cache has them."""

    row: int
    start: int
    stop: int
    parts: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


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
        self.memory = huge_pages.zeros(shape, dtype, device)  # all of it, for the kernels
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

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make `target` hold the first `length` positions of `source`."""
        if source != target:
            for one, other in zip(
                self._views(source, 0, length), self._views(target, 0, length), strict=True
            ):
                other.copy_(one)
        self.lengths[target] = length

    def take(self, row: int, start: int, stop: int) -> Span:
        """A copy of a row's positions from `start` on, before `stop`."""
        return Span(row, start, stop, tuple(part.clone() for part in self._views(row, start, stop)))

    def put_back(self, span: Span) -> None:
        """Make its row hold these positions as they were when it was taken."""
        for part, place in zip(span.parts, self._views(span.row, span.start, span.stop), strict=True):
            place.copy_(part)

    def wipe(self, row: int, length: int) -> None:
        """Zero what lies past the first `length` positions."""
        for part in self._views(row, length, self.stored):
            part.zero_()

    def _views(self, row: int, start: int, stop: int) -> list[Tensor]:
        """A row's values and keys from position `start` on, before `stop`, as views: keys in blocks are whole
        blocks, and blocks in part before and after them."""
        keys, values = self._keys[:, row], self._values[:, row, :, start:stop]
        if not self.blocked:
            return [values, keys[:, :, start:stop]]
        first, last = math.ceil(start / BLOCK), stop // BLOCK  # of the whole ones
        if first > last:  # all of it within one block [layers, H, D / word, 32, word]
            return [values, keys[:, :, last, :, start % BLOCK : stop % BLOCK]]
        found = [values, keys[:, :, first:last]]
        if start % BLOCK:
            found.append(keys[:, :, first - 1, :, start % BLOCK :])
        if stop % BLOCK:
            found.append(keys[:, :, last, :, : stop % BLOCK])
        return found

    def zero_row(self, row: int) -> None:
        """Forget a row, its garbage too."""
        self.wipe(row, 0)
        self.lengths[row] = 0

    @staticmethod
    def bytes_per_row(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """What one row of a cache with that many usable positions takes."""
        return KVCache.bytes_of(spec, _stored(positions, SLACK), dtype)

    @staticmethod
    def bytes_of(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """What the keys and values of so many positions take, by themselves."""
        return 2 * spec.layers * spec.kv_heads * spec.head_dim * positions * dtype.itemsize
