"""The KV cache: keys and values of every sequence, in rows, addressed by absolute position.

Rollback sets a length, which only the owner of the sequences does, at commit. Positions past a row's length
hold finite garbage, since a mask cannot hide NaN: the memory starts zeroed, and a caller that meets
non-finite values wipes. The C kernels need keys in blocks of 32 positions, [D / word, 32, word] each, where a
word is one float32 or float16, or two bfloat16. A row offers `positions`; `slack` more follow for the padding
of a pass, and from `scratch` on another `slack`, where the idle rows of a batch write.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.kernels import pool
from foredraft.model.recurrent import RecurrentRows, recurrent_bytes
from foredraft.model.spec import OUTSIDE, ModelSpec, Plan

# A row stores a multiple of this many positions, so that every attended length can be padded to its bucket.
STORED_MULTIPLE = 1024
SLACK = 256  # default `slack` in positions: the longest padding of a pass
BLOCK = 32  # positions in one block of keys, as the C kernels read them


def _stored(positions: int, slack: int) -> int:
    """Return the positions that a row stores to offer `positions` of them."""
    return math.ceil((positions + 2 * slack) / STORED_MULTIPLE) * STORED_MULTIPLE


def _in_blocks(keys: Tensor, blocked: bool) -> Tensor:
    """Return keys [..., P, D] in blocks, [..., P / block, D / word, block, word]; plain ones hold a key."""
    *outer, stored, dim = keys.shape
    block, word = (BLOCK, 2 if keys.dtype == torch.bfloat16 else 1) if blocked else (1, dim)
    return keys.view(*outer, stored // block, dim // word, block, word)


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of the positions `start` up to, not including, `stop` of one row."""

    row: int
    start: int
    stop: int
    parts: tuple[Tensor, ...]  # keys and values in the layout of the cache
    states: tuple[Tensor, ...] = ()  # of recurrent layers, where the row stood at `stop`
    base: int = 0  # the position from which on these states serve

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (*self.parts, *self.states))

    def on_host(self) -> Span:
        parts, states = (tuple(part.cpu() for part in each) for each in (self.parts, self.states))
        return replace(self, parts=parts, states=states)


class CacheLayers:
    """The keys and values that a pass reads and writes, layer by layer: of one cache, or of two joined."""

    recurrent: RecurrentRows | None = None  # what recurrent layers keep
    lengths: list[int]  # the valid positions of each row; the owner of the sequences sets them

    def __init__(self, layers: Sequence[Tensor], positions: int, slack: int, *, blocked: bool) -> None:
        _, self.rows, _, self.stored, _ = layers[0].shape
        assert all(layer.shape[1] == self.rows and layer.shape[3] == self.stored for layer in layers)
        self.positions, self.slack, self.scratch = positions, slack, positions + slack
        self.device, self.dtype, self.blocked = layers[0].device, layers[0].dtype, blocked
        self._layers = tuple(layers)
        self._layer_keys = [_in_blocks(layer[0], blocked) for layer in layers]
        self._pointers = array("Q", (layer.data_ptr() for layer in layers))

    def recurring(self, plan: Plan, start: int, stop: int) -> list[int]:
        """Return the layers of [start, stop) that run and are recurrent, as places among all that are."""
        layers = () if self.recurrent is None else self.recurrent.layers
        return [n for n, layer in enumerate(layers) if start <= layer < stop and plan.attention[layer]]

    def begin(self, row: int, start: int, count: int, own: Sequence[int], *, certain: bool = False) -> int:
        """Begin a pass of recurrent layers over a row; return the position to which their bases move.

        Unless it reads a prompt, that is the row's length at most: what is behind it may be drafted.
        """
        assert self.recurrent is not None
        base = start + count if certain else min(self.lengths[row], start)
        self.recurrent.begin(row, start, start if certain else start + count, base, own)
        return base

    def joined(self, depth: int, other: CacheLayers) -> CacheLayers:
        """Return the layers below `depth`, and all of another cache behind them."""
        layers = (*self._layers[:depth], *other._layers)
        joined = CacheLayers(layers, self.positions, self.slack, blocked=self.blocked)
        joined.recurrent, joined.lengths = self.recurrent and self.recurrent.first(depth), self.lengths
        return joined

    def chosen(self, layers: Sequence[int]) -> CacheLayers:
        chosen = [self._layers[layer] for layer in layers]
        return CacheLayers(chosen, self.positions, self.slack, blocked=self.blocked)

    def aligned(self, spec: ModelSpec, *, blocked: bool = False) -> KVCache:
        """Return a zeroed cache of another model on the same device, with as many rows and positions."""
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
        assert not self.blocked, "keys in blocks have no view in order of positions"
        return self._layers[index]

    def read(self, layer: int, first_row: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        rows = slice(first_row, first_row + count)
        keys, values = self._layers[layer][:, rows, :, :length].unbind()
        if self.blocked:
            blocks = self._layer_keys[layer][rows, :, : math.ceil(length / BLOCK)]
            keys = blocks.transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :length]
        return keys, values


class KVCache(CacheLayers):
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
        own: dict[tuple[int, int], list[int]] = {}  # (H, D) -> the layers that store so many
        for layer, window in enumerate(spec.windows[: spec.layers]):
            if spec.stores(layer) or spec.source_of(layer) == OUTSIDE:  # what is outside is not: to be timed
                own.setdefault((spec.kv_heads_of(window), spec.head_dim_of(window)), []).append(layer)
        stored, places = _stored(positions, slack), dict[int, Tensor]()
        # all keys and values: [layers, 2, R, H, P, D] of the layers with heads of one shape each
        self.planes: list[Tensor] = []
        for (heads, dim), layers in own.items():
            self.planes.append(pool.zeros((len(layers), 2, rows, heads, stored, dim), dtype, device))
            places |= zip(layers, self.planes[-1].unbind(), strict=True)
        # a recurrent layer has no keys of its own, and reads none
        places |= dict.fromkeys(spec.recurrent_layers, next(iter(places.values())))
        stored_in = (layer if layer in places else spec.source_of(layer) for layer in range(spec.layers))
        all_layers = [places[layer] for layer in stored_in]
        super().__init__(all_layers, positions, slack, blocked=blocked)
        if spec.recurrent is not None:
            self.recurrent = RecurrentRows(spec.recurrent, spec.recurrent_layers, rows, device, dtype)
        self.lengths = [0] * rows
        # keys in blocks, and values [layers, R, H, P, D], of every plane
        self._pairs = [(_in_blocks(plane[:, 0], blocked), plane[:, 1]) for plane in self.planes]

    @property
    def data(self) -> Tensor:
        """All keys and values as they lie, [layers, 2, R, H, P, D]; only where all heads have one shape."""
        [plane] = self.planes
        return plane

    def write(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [H, T, D] of one row at the positions from `start` on."""
        stop, blocks = start + keys.shape[1], self._layer_keys[layer]
        self._layers[layer][1, row, :, start:stop] = values
        if not self.blocked:
            self._layers[layer][0, row, :, start:stop] = keys
            return
        positions = torch.arange(start, stop, device=self.device)
        words = keys.to(self.dtype).reshape(*keys.shape[:2], -1, blocks.shape[-1])  # [H, T, D / word, word]
        blocks[row][:, positions // BLOCK, :, positions % BLOCK] = words.transpose(0, 1)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`, and set the target's length."""
        if source != target:
            _copy(self._views(source, 0, length), self._views(target, 0, length))
            if self.recurrent is not None:
                self.recurrent.copy(source, target)
        self.lengths[target] = length

    def move(self, row: int, source: int, target: int) -> None:
        for keys, values in self._pairs:
            block = keys.shape[-2]
            moved = keys[:, row, :, source // block, :, source % block]
            keys[:, row, :, target // block, :, target % block] = moved
            values[:, row, :, target] = values[:, row, :, source]
        if self.recurrent is not None:
            self.recurrent.move(row, source, target)

    def base(self, row: int) -> int:
        """Return the position below which the length of a row must not be set."""
        return 0 if self.recurrent is None or not self.lengths[row] else self.recurrent.base(row)

    def take(self, row: int, start: int, stop: int, *, states: bool = True) -> Span:
        """Return a copy of a row's keys and values, and of its states where `stop` is its length."""
        parts = tuple(part.clone() for part in self._views(row, start, stop))
        if states and self.recurrent is not None and self.base(row) <= stop == self.lengths[row] > 0:
            return Span(row, start, stop, parts, self.recurrent.take(row, stop), self.base(row))
        return Span(row, start, stop, parts)

    def put_back(self, span: Span) -> None:
        if self.recurrent is not None and span.states:
            self.recurrent.put_back(span.row, span.states)
        _copy(span.parts, self._views(span.row, span.start, span.stop))

    def wipe(self, row: int, length: int) -> None:
        for part in self._views(row, length, self.stored):
            part.zero_()

    def _views(self, row: int, start: int, stop: int) -> list[Tensor]:
        """Return views of positions of a row; keys come as whole blocks, and partial ones at the ends."""
        views: list[Tensor] = []
        for keys, values in self._pairs:
            keys, block = keys[:, row], keys.shape[-2]
            views.append(values[:, row, :, start:stop])
            first, last = math.ceil(start / block), stop // block  # the whole blocks are [first, last)
            if first > last:  # the positions lie within a single block
                views.append(keys[:, :, last, :, start % block : stop % block])
                continue
            views.append(keys[:, :, first:last])
            if start % block:
                views.append(keys[:, :, first - 1, :, start % block :])
            if stop % block:
                views.append(keys[:, :, last, :, : stop % block])
        return views

    def zero_row(self, row: int) -> None:
        self.wipe(row, 0)
        if self.recurrent is not None:
            self.recurrent.wipe(row)
        self.lengths[row] = 0

    @staticmethod
    def bytes_per_row(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """Return the memory of one row that offers `positions` positions, in bytes, slack included."""
        return KVCache.bytes_of(spec, _stored(positions, SLACK), dtype) + recurrent_bytes(spec, dtype)

    @staticmethod
    def bytes_of(spec: ModelSpec, positions: int, dtype: torch.dtype) -> int:
        """Return the memory of the keys and values of `positions` positions, in bytes, without slack."""
        return spec.cached_values * positions * dtype.itemsize


def _copy(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places, strict=True):
        place.copy_(part)
