"""Recurrent layers: what a cache keeps of each row, and how a pass goes through it, whatever their kind.

A row of the cache has a *base*, the state of a layer at a position, and a *log* of what the projections gave
for the positions around and after it, at their places modulo LOG. A pass takes the base, goes token by token
through the entries up to its first column, and through its columns. Only positions below the row's length
move the base, so that rollback sets a length. What a draft wrote behind it, be it by the target's own layers,
is written again by the pass that verifies it. A leaf of a token tree is logged behind the columns, until the
text goes on after it. A chunk of a prompt is certain, and moves the base to its end.

Every position takes the same operations in the same order, whatever pass it is in, so its bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels import pool
from foredraft.model.layers import Norm, Product, RowSpan, product
from foredraft.model.recurrent_sizes import RecurrentSizes

if TYPE_CHECKING:
    from foredraft.model.spec import ModelSpec

LOG = 64  # positions of a log
# columns of a pass at most: a log holds as many leaves behind them, or those of a pass before, and 8 taps
COLUMNS = 28
LANES = 16  # values of a block of states are a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The weights of a recurrent layer, in the place of attention; a kind says what they compute."""

    sizes: RecurrentSizes
    norm: Norm | None
    qkv: Product  # what is convolved, and at the end what the output is gated by
    rates: Product | None = None  # of every head of values; None: they lie in `qkv`, behind what is convolved
    taps: Tensor  # of the convolution, [channels, taps] float32
    shift: Tensor | None = None  # what it adds, [channels] float32
    output: Product
    post_norm: Norm | None = None

    @property
    def products(self) -> list[Product]:
        rates = [] if self.rates is None else [self.rates]
        return [self.qkv, *rates, self.output]

    def changed(self, change: Callable[[Product], Product]) -> Self:
        """Return these with products changed, but for the rates: small, they decide how fast states fade."""
        return replace(self, qkv=change(self.qkv), output=change(self.output))

    def project(self, x: Tensor, span: RowSpan | None) -> tuple[Tensor, Tensor]:
        """Return the entries [N, entry] of hidden states [N, hidden], and what gates their outputs."""
        normed = x if self.norm is None else self.norm(x)
        projected = product(self.qkv, normed, span)
        if self.rates is not None:
            channels, gates = projected.tensor_split((self.sizes.channels,), 1)
            projected = torch.cat([channels, product(self.rates, normed, span), gates], 1)
        return projected[:, : self.sizes.entry], projected[:, -self.sizes.values :]

    def convolved(self, window: Tensor) -> Tensor:
        """Return the channels of the last position of a window [taps, entry] of entries."""
        taps = window[:, : self.sizes.channels].float()
        sum = torch.zeros_like(self.taps[:, 0]) if self.shift is None else self.shift
        for tap in range(self.sizes.taps):
            sum = sum + taps[tap] * self.taps[:, tap]
        return sum.to(window.dtype)

    def convolved_heads(self, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys of every head of values [value_heads, key_dim], and values, in float32."""
        sizes = self.sizes
        convolved = F.silu(self.convolved(window)).float()
        q, k, v = torch.tensor_split(convolved, (sizes.keys, 2 * sizes.keys))
        groups = sizes.value_heads // sizes.key_heads
        q, k = (x.view(-1, sizes.key_dim).repeat_interleave(groups, 0) for x in (q, k))
        return q, k, v.view(sizes.value_heads, -1)

    def step(self, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a position reads [value_heads, value_dim] in float32, and its state.

        state: that of the position before, [value_heads, blocks, key_dim, values of a block].
        """
        raise NotImplementedError

    def gated(self, read: Tensor, gates: Tensor) -> Tensor:
        """Return what a position gives [values]: what its heads read, and what gates it, [values]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Run:
    """The columns of one row in a pass."""

    row: int  # of the cache
    first: int  # the first column, among all that the pass computes
    count: int
    start: int  # the position of the first column
    base: int  # the position to which the base moves


class RecurrentRows:
    """The bases and logs of all rows, layer by layer."""

    def __init__(
        self,
        sizes: RecurrentSizes,
        layers: Sequence[int],
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.taps, blocks = sizes.taps, sizes.value_dim // block_of(sizes)
        self.layers = tuple(layers)
        self.reach = LOG - self.taps  # positions behind a base that the log holds, and taps before it
        shape = (len(layers), rows, sizes.value_heads, blocks, sizes.key_dim, block_of(sizes))
        self.bases = pool.zeros(shape, torch.float32, device)
        self.logs = pool.zeros((len(layers), rows, LOG, sizes.entry), dtype, device)
        # the positions of the bases; that at 0 is zero, whatever is stored
        self.at = torch.zeros(len(layers), rows, dtype=torch.int64)

    def first(self, depth: int) -> RecurrentRows | None:
        """Return those of the layers below `depth`, in the same memory; None without any."""
        count, part = sum(layer < depth for layer in self.layers), copy(self)
        part.layers, part.at = self.layers[:count], self.at[:count]
        part.bases, part.logs = self.bases[:count], self.logs[:count]
        return part if count else None

    def begin(self, row: int, start: int, stop: int, base: int, own: Sequence[int]) -> None:
        """Begin a pass of layers over positions of a row, at 0 anew.

        The log holds what is between their bases and `stop`; own: their places among all that are recurrent.
        """
        places = torch.tensor(own)
        if start == 0:
            self.at[places, row] = 0
        at = self.at[places, row]
        first, last = int(at.min()), int(at.max())
        if last > start or start - first > self.reach or stop - max(first, base) > self.reach:
            raise ValueError(
                f"row {row} has states at {first} to {last}, not for positions {start} to {stop}"
            )

    def pretend(self, position: int) -> None:
        """Let all rows stand at a position, as if they had read so much; to be timed."""
        self.at[:] = position

    def copy(self, source: int, target: int) -> None:
        for part in (self.bases, self.logs, self.at):
            part[:, target] = part[:, source]

    def base(self, row: int) -> int:
        """Return the position below which a row's length must not be set: its states are there."""
        return int(self.at[:, row].max())

    def move(self, row: int, source: int, target: int) -> None:
        """Put the entry of a leaf where that of its place is."""
        self.logs[:, row, target % LOG] = self.logs[:, row, source % LOG]

    def take(self, row: int, stop: int) -> tuple[Tensor, ...]:
        """Return copies of what a row holds up to a position: its bases, and its log from their taps on."""
        at = self.at[:, row].clone()
        places = torch.arange(int(at.min()) - (self.taps - 1), stop, device=self.logs.device) % LOG
        return self.bases[:, row].clone(), self.logs[:, row, places], at, places

    def put_back(self, row: int, parts: tuple[Tensor, ...]) -> None:
        """Take what `take` gave back."""
        bases, log, at, places = parts
        self.bases[:, row], self.at[:, row] = bases, at
        self.logs[:, row, places.to(self.logs.device)] = log.to(self.logs.device)

    def wipe(self, row: int) -> None:
        """Let a row hold finite numbers alone, and begin at position 0."""
        for part in (self.bases, self.logs, self.at):
            part[:, row] = 0


def recurrent_bytes(spec: ModelSpec, dtype: torch.dtype, entries: int = LOG) -> int:
    """Return the memory of a row's bases and of so many entries of its logs, in bytes."""
    if spec.recurrent is None:
        return 0
    layer = spec.recurrent.state * torch.float32.itemsize + entries * spec.recurrent.entry * dtype.itemsize
    return layer * len(spec.recurrent_layers)


def snapshot_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory of a snapshot where a chunk of a prompt ends, in bytes."""
    return 0 if spec.recurrent is None else recurrent_bytes(spec, dtype, spec.recurrent.taps - 1)


def unfit_sizes(sizes: RecurrentSizes) -> str | None:
    """Return what the kernels ask of sizes that they do not take (kernels/recurrent.inc); None: they do."""
    for name, size, most in (("keys", sizes.key_dim, 256), ("values", sizes.value_dim, 2**16)):
        if size % LANES or size > most:
            return f"heads of {name} have a multiple of {LANES} numbers, {most} at most, and not {size}"
    return None if sizes.taps <= 8 else f"convolutions have 8 taps at most, and not {sizes.taps}"


def block_of(sizes: RecurrentSizes) -> int:
    """Return how many values of a head lie together in a base."""
    return next((size for size in (64, 32, LANES) if sizes.value_dim % size == 0), sizes.value_dim)


def mix(
    weights: Recurrence, entries: Tensor, gates: Tensor, rows: RecurrentRows, layer: int, runs: Sequence[Run]
) -> Tensor:
    """Return what a layer gives for columns [N, values], of what it projected, before the last product.

    Operators compute the end of a row otherwise than its middle, so a position is computed by itself.
    """
    sizes, mixed = weights.sizes, entries.new_zeros(len(entries), weights.sizes.values)
    for run in runs:
        log, at = rows.logs[layer, run.row], int(rows.at[layer, run.row])
        first = at - (sizes.taps - 1)
        places = torch.arange(first, run.start, device=log.device)
        known = log[places % LOG].where((places >= 0)[:, None], 0.0)
        own = torch.cat([known, entries[run.first : run.first + run.count]])  # from position `first` on
        base = rows.bases[layer, run.row]
        state, moved = base if at else torch.zeros_like(base), None
        for position in range(at, run.start + run.count):
            read, state = weights.step(own[position - at : position - first + 1], state)
            if position + 1 == run.base:
                moved = state
            if position >= run.start:
                column = run.first + position - run.start
                mixed[column] = weights.gated(read.to(mixed.dtype), gates[column])
        if moved is not None:
            base.copy_(moved)
            rows.at[layer, run.row] = run.base
        last = min(LOG, run.count)
        places = torch.arange(run.start + run.count - last, run.start + run.count, device=log.device)
        log[places % LOG] = own[len(own) - last :]
    return mixed
