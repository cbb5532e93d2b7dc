"""The KV cache: keys and values of every sequence, in rows, addressed by absolute position.

Contract: rollback sets a length, on models with sliding windows too, because windows live in the mask
(docs/architecture.md). Positions past a row's length must hold finite garbage, since a mask cannot hide NaN:
the memory starts zeroed, and a caller that meets non-finite values calls `wipe` or `zero_row`. The owner of
the sequences sets `lengths`, at commit only; neither this module nor a forward does.

Layers whose heads have the same number and size lie in one tensor. A layer that reads the keys and values of
another has none of its own, and is that layer here.

Layout: values are stored position after position. Keys are stored the same way for PyTorch's operators; the
C kernels need them in blocks of 32 positions, [D / word, 32, word] each, where a word is one float32 or two
bfloat16. Only this module and the kernels know the layout; other modules read, write, copy and wipe
positions.

A row offers `positions` positions. `slack` more follow them, which the padding of the row's longest pass may
overwrite, and from `scratch` on another `slack`, where the idle rows of a batch write.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kernels import huge_pages
from foredraft.model.spec import OUTSIDE, ModelSpec

# A row stores a multiple of this many positions, so that every attended length can be padded to its bucket.
STORED_MULTIPLE = 1024
SLACK = 256  # default `slack` in positions: the longest padding of a pass
BLOCK = 32  # positions in one block of keys, as the C kernels read them
NO_VIEW = "keys in blocks have no view in order of positions"


def _stored(positions: int, slack: int) -> int:
    """Return the positions that a row stores to offer `positions` of them."""
    return math.ceil((positions + 2 * slack) / STORED_MULTIPLE) * STORED_MULTIPLE


def _in_blocks(keys: Tensor) -> Tensor:
    """Return keys [..., P, D] in blocks, [..., P / 32, D / word, 32, word]."""
    *outer, stored, dim = keys.shape
    word = 4 // keys.dtype.itemsize
    return keys.view(*outer, stored // BLOCK, dim // word, BLOCK, word)


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of the positions `start` up to, not including, `stop` of one row."""

    row: int
    start: int
    stop: int
    parts: tuple[Tensor, ...]  # keys and values in the layout of the cache

    @property
    def bytes(self) -> int:
        """The memory that the copy takes, in bytes."""
        return sum(part.nbytes for part in self.parts)


class CacheLayers:
    """The keys and values that a pass reads and writes, layer by layer: those of one cache, or of two joined.

    Args:
        layers: Keys and values of each layer, [2, R, H, P, D].
        positions: The positions that a row offers.
        slack: Further positions that the padding of a pass may overwrite.
        blocked: Keys are stored in blocks.

    Attributes:
        rows: R, the sequences that the cache holds.
        stored: P, the positions that a row stores, slack and scratch included.
        scratch: The first position that idle rows of a batch write to.
    """

    def __init__(self, layers: Sequence[Tensor], positions: int, slack: int, *, blocked: bool) -> None:
        _, self.rows, _, self.stored, _ = layers[0].shape
        assert all(layer.shape[1] == self.rows and layer.shape[3] == self.stored for layer in layers)
        self.positions, self.slack, self.scratch = positions, slack, positions + slack
        self.device, self.dtype, self.blocked = layers[0].device, layers[0].dtype, blocked
        self._layers = tuple(layers)
        self._layer_keys = [_in_blocks(layer[0]) if blocked else layer[0] for layer in layers]
        self._pointers = array("Q", (layer.data_ptr() for layer in layers))

    def joined(self, depth: int, other: CacheLayers) -> CacheLayers:
        """Return the first `depth` layers of this cache and, after them, those of another with equal rows."""
        layers = (*self._layers[:depth], *other._layers)
        return CacheLayers(layers, self.positions, self.slack, blocked=self.blocked)

    def chosen(self, layers: Sequence[int]) -> CacheLayers:
        """Return the given layers of this cache, in the given order."""
        chosen = [self._layers[layer] for layer in layers]
        return CacheLayers(chosen, self.positions, self.slack, blocked=self.blocked)

    def beside(self, spec: ModelSpec, *, blocked: bool = False) -> KVCache:
        """Return a zeroed cache of another model, of as many rows and positions, on the same device.

        Its keys are stored in blocks only where `blocked` says so.
        """
        return KVCache(
            spec, self.rows, self.positions,
            device=self.device, dtype=self.dtype, slack=self.slack, blocked=blocked,
        )  # fmt: skip

    @property
    def pointers(self) -> int:
        """The address of the layers' addresses, for the C kernels."""
        return self._pointers.buffer_info()[0]

    def layer(self, index: int) -> Tensor:
        """Return keys and values of a layer, [2, R, H, P, D]; only of a cache that is not `blocked`."""
        assert not self.blocked, NO_VIEW
        return self._layers[index]

    def read(self, layer: int, first_row: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of several rows.

        Args:
            layer: The layer to read.
            first_row: The first row to read.
            count: B, the rows to read.
            length: L, the positions to read, from 0 on.

        Returns:
            Keys and values, [B, H, L, D] each: views of the memory, except that keys in blocks are copied.
        """
        rows = slice(first_row, first_row + count)
        keys, values = self._layer_keys[layer][rows], self._layers[layer][1, rows, :, :length]
        if self.blocked:
            blocks = keys[:, :, : math.ceil(length / BLOCK)]  # [B, H, L / 32, D / word, 32, word]
            keys = blocks.transpose(3, 4).flatten(4).flatten(2, 3)
        return keys[:, :, :length], values


class KVCache(CacheLayers):
    """The KV cache of one decoder.

    Attributes:
        lengths: The valid positions of each row; the owner of the sequences sets them.
        planes: All keys and values: [layers, 2, R, H, P, D] of the layers with heads of one shape.
    """

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
        """Allocate a zeroed cache.

        Args:
            spec: The model whose keys and values the cache holds.
            rows: The number of sequences.
            positions: The positions that each row offers.
            device: Where the memory is.
            dtype: The dtype of keys and values.
            slack: Positions that the padding of a pass may overwrite; at least the longest padding.
            blocked: Store keys in blocks, as the C kernels need them.
        """
        own: dict[tuple[int, int], list[int]] = {}  # (H, D) -> the layers that store so many
        for layer, window in enumerate(spec.windows[: spec.layers]):
            if spec.stores(layer) or spec.source_of(layer) == OUTSIDE:  # what is outside is not: to be timed
                own.setdefault((spec.kv_heads_of(window), spec.head_dim_of(window)), []).append(layer)
        stored, places = _stored(positions, slack), dict[int, Tensor]()
        self.planes: list[Tensor] = []
        for (heads, dim), layers in own.items():
            self.planes.append(huge_pages.zeros((len(layers), 2, rows, heads, stored, dim), dtype, device))
            places |= zip(layers, self.planes[-1].unbind(), strict=True)
        all_layers = [
            places[layer if layer in places else spec.source_of(layer)] for layer in range(spec.layers)
        ]
        super().__init__(all_layers, positions, slack, blocked=blocked)
        self.lengths = [0] * rows
        # keys and values [layers, R, H, P, D] of every plane
        self._pairs = [
            (_in_blocks(keys) if blocked else keys, values)
            for keys, values in (plane.unbind(1) for plane in self.planes)
        ]

    @property
    def memory(self) -> Tensor:
        """All keys and values [layers, 2, R, H, P, D]; only where all heads have one shape."""
        [plane] = self.planes
        return plane

    @property
    def data(self) -> Tensor:
        """As `memory`; only for a cache that is not `blocked`."""
        assert not self.blocked, NO_VIEW
        return self.memory

    @property
    def nbytes(self) -> int:
        """The memory of all keys and values, in bytes."""
        return sum(plane.nbytes for plane in self.planes)

    def write(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [H, T, D] of one row at the positions from `start` on."""
        stop, own = start + keys.shape[1], self._layer_keys[layer]
        self._layers[layer][1, row, :, start:stop] = values
        if not self.blocked:
            own[row, :, start:stop] = keys
            return
        positions = torch.arange(start, stop, device=self.device)
        word = own.shape[-1]
        words = keys.to(self.dtype).reshape(*keys.shape[:2], -1, word)  # [H, T, D / word, word]
        own[row][:, positions // BLOCK, :, positions % BLOCK] = words.transpose(0, 1)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`, and set the target's length."""
        if source != target:
            pairs = zip(self._views(source, 0, length), self._views(target, 0, length), strict=True)
            for original, copy in pairs:
                copy.copy_(original)
        self.lengths[target] = length

    def move(self, row: int, source: int, target: int) -> None:
        """Copy the keys and values at position `source` of one row to position `target`."""
        for keys, values in self._pairs:
            values[:, row, :, target] = values[:, row, :, source]
            if self.blocked:
                moved = keys[:, row, :, source // BLOCK, :, source % BLOCK]
                keys[:, row, :, target // BLOCK, :, target % BLOCK] = moved
            else:
                keys[:, row, :, target] = keys[:, row, :, source]

    def take(self, row: int, start: int, stop: int) -> Span:
        """Return a copy of the positions `start` up to, not including, `stop` of one row."""
        return Span(row, start, stop, tuple(part.clone() for part in self._views(row, start, stop)))

    def put_back(self, span: Span) -> None:
        """Restore the positions of a span to what they held when the span was taken."""
        for part, place in zip(span.parts, self._views(span.row, span.start, span.stop), strict=True):
            place.copy_(part)

    def wipe(self, row: int, length: int) -> None:
        """Zero every stored position of a row past the first `length`."""
        for part in self._views(row, length, self.stored):
            part.zero_()

    def _views(self, row: int, start: int, stop: int) -> list[Tensor]:
        """Return views of a row's values and keys at the positions `start` up to, not including, `stop`."""
        return [view for pair in self._pairs for view in self._views_of(*pair, row, start, stop)]

    def _views_of(self, keys: Tensor, values: Tensor, row: int, start: int, stop: int) -> list[Tensor]:
        """Return the views of one plane.

        Keys in blocks come as several views: the whole blocks, and a partial block before and after them.
        """
        keys, values = keys[:, row], values[:, row, :, start:stop]
        if not self.blocked:
            return [values, keys[:, :, start:stop]]
        first, last = math.ceil(start / BLOCK), stop // BLOCK  # the whole blocks are [first, last)
        if first > last:  # the positions lie within a single block
            return [values, keys[:, :, last, :, start % BLOCK : stop % BLOCK]]
        views = [values, keys[:, :, first:last]]
        if start % BLOCK:
            views.append(keys[:, :, first - 1, :, start % BLOCK :])
        if stop % BLOCK:
            views.append(keys[:, :, last, :, : stop % BLOCK])
        return views

    def zero_row(self, row: int) -> None:
        """Zero every stored position of a row and set its length to 0."""
        self.wipe(row, 0)
        self.lengths[row] = 0

    @staticmethod
    def bytes_per_row(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """Return the memory of one row that offers `positions` positions, in bytes, slack included."""
        return KVCache.bytes_of(spec, _stored(positions, SLACK), dtype)

    @staticmethod
    def bytes_of(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """Return the memory of the keys and values of `positions` positions, in bytes, without slack."""
        return spec.cached_values * positions * dtype.itemsize
