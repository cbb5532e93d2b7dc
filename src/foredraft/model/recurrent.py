"""Gated delta nets (arXiv:2412.06464): what a layer computes, and what a cache keeps of each row.

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
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels import pool
from foredraft.model.layers import Norm, Product
from foredraft.model.recurrent_sizes import DeltaSizes

if TYPE_CHECKING:
    from foredraft.model.spec import ModelSpec

LOG = 64  # positions of a log
# columns of a pass at most: a log holds as many leaves behind them, or those of a pass before, and 8 taps
COLUMNS = 28
LANES = 16  # values of a block of states are a multiple of it
EPSILON = 1e-6  # of the length of queries and keys


@dataclass(frozen=True, slots=True)
class Delta:
    """The weights of a gated delta net, in the place of attention."""

    norm: Norm | None
    qkv: Product  # queries, keys and values before the convolution, then what gates the output, z
    rates: Product  # b and a of every head of values, which give beta and the decay
    taps: Tensor  # of the convolution, [channels, taps] float32
    decay: Tensor  # -exp(A), [value_heads] float32
    bias: Tensor  # of a, [value_heads] float32
    output_norm: Tensor  # the weight of the norm of a head's output, [value_dim] float32
    eps: float  # of that norm
    output: Product
    post_norm: Norm | None = None

    @property
    def products(self) -> list[Product]:
        return [self.qkv, self.rates, self.output]

    def changed(self, change: Callable[[Product], Product]) -> Delta:
        """Return these with products changed, but for the rates: small, they decide how fast states fade."""
        return replace(self, qkv=change(self.qkv), output=change(self.output))


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
        self, sizes: DeltaSizes, layers: Sequence[int], rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.taps, blocks = sizes.taps, sizes.value_dim // block_of(sizes)
        self.layers = tuple(layers)  # the layers of the model that are recurrent
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

    def move(self, row: int, source: int, target: int) -> None:
        """Put the entry of a leaf where that of its place is."""
        self.logs[:, row, target % LOG] = self.logs[:, row, source % LOG]

    def take(self, row: int, stop: int) -> tuple[Tensor, ...]:
        """Return copies of what a row holds up to a position; where bases are there, little of the log."""
        at = self.at[:, row].clone()
        places = torch.arange(stop - (self.taps - 1 if bool((at == stop).all()) else LOG), stop) % LOG
        return self.bases[:, row].clone(), self.logs[:, row, places.to(self.logs.device)], at, places

    def put_back(self, row: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take what `take` gave back, and return the parts behind it."""
        bases, log, at, places, *others = parts
        self.bases[:, row], self.at[:, row] = bases, at
        self.logs[:, row, places.to(self.logs.device)] = log.to(self.logs.device)
        return tuple(others)

    def wipe(self, row: int) -> None:
        """Let a row hold finite numbers alone, and begin at position 0."""
        for part in (self.bases, self.logs, self.at):
            part[:, row] = 0


def recurrent_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory of a row's bases and logs, in bytes."""
    if spec.delta is None:
        return 0
    layer = spec.delta.state * torch.float32.itemsize + LOG * spec.delta.entry * dtype.itemsize
    return layer * len(spec.recurrent_layers)


def unfit_sizes(sizes: DeltaSizes) -> str | None:
    """Return what the kernels ask of sizes that they do not take (kernels/recurrent.inc); None: they do."""
    for name, size, most in (("keys", sizes.key_dim, 256), ("values", sizes.value_dim, 2**16)):
        if size % LANES or size > most:
            return f"heads of {name} have a multiple of {LANES} numbers, {most} at most, and not {size}"
    return None if sizes.taps <= 8 else f"convolutions have 8 taps at most, and not {sizes.taps}"


def block_of(sizes: DeltaSizes) -> int:
    """Return how many values of a head lie together in a base."""
    return next((size for size in (64, 32, LANES) if sizes.value_dim % size == 0), sizes.value_dim)


def mix(
    sizes: DeltaSizes, weights: Delta, projected: Tensor, rates: Tensor, rows: RecurrentRows, layer: int,
    runs: Sequence[Run],
) -> Tensor:  # fmt: skip
    """Return what the heads give for columns [N, values], of their projections, before the last one.

    Operators compute the end of a row otherwise than its middle, so a position is computed by itself.
    """
    mixed = projected.new_zeros(len(projected), sizes.values)
    entries = torch.cat([projected[:, : sizes.channels], rates], 1)
    z = projected[:, sizes.channels :]
    for run in runs:
        log, at = rows.logs[layer, run.row], int(rows.at[layer, run.row])
        first = at - (sizes.taps - 1)
        places = torch.arange(first, run.start)
        known = log[places % LOG].where((places >= 0).to(log.device)[:, None], 0.0)
        own = torch.cat([known, entries[run.first : run.first + run.count]])  # from position `first` on
        base = rows.bases[layer, run.row]  # [value_heads, blocks, key_dim, values of a block]
        state, moved = base if at else torch.zeros_like(base), None
        for position in range(at, run.start + run.count):
            q, state = _step(sizes, weights, own[position - at : position - first + 1], state)
            if position + 1 == run.base:
                moved = state
            if position >= run.start:
                read = (state * q[:, None, :, None]).sum(2).view(sizes.value_heads, sizes.value_dim)
                column = run.first + position - run.start
                mixed[column] = _gated(weights, read.to(mixed.dtype), z[column])
        if moved is not None:
            base.copy_(moved)
            rows.at[layer, run.row] = run.base
        last = min(LOG, run.count)
        places = torch.arange(run.start + run.count - last, run.start + run.count) % LOG
        log[places] = own[len(own) - last :]
    return mixed


def _step(sizes: DeltaSizes, weights: Delta, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries of a position, and its state after the one before; window: entries [taps, entry]."""
    taps, convolved = window[:, : sizes.channels].float(), torch.zeros_like(weights.taps[:, 0])
    for tap in range(sizes.taps):
        convolved = convolved + taps[tap] * weights.taps[:, tap]
    convolved = F.silu(convolved.to(window.dtype)).float()
    q, k, v = torch.tensor_split(convolved, (sizes.keys, 2 * sizes.keys))
    groups = sizes.value_heads // sizes.key_heads
    q, k = (_unit(x.view(-1, sizes.key_dim)).repeat_interleave(groups, 0) for x in (q, k))
    b, a = torch.tensor_split(window[-1, sizes.channels :], 2)
    beta = torch.sigmoid(b).float()
    decay = torch.exp(weights.decay * F.softplus(a.float() + weights.bias))
    key = k[:, None, :, None]
    state = state * decay[:, None, None, None]
    change = (v.view(state.shape[0], state.shape[1], -1) - (state * key).sum(2)) * beta[:, None, None]
    return q * sizes.key_dim**-0.5, state + key * change[:, :, None]


def _gated(weights: Delta, read: Tensor, z: Tensor) -> Tensor:
    """Return what the heads of a position give, [values]: normed, and gated by z."""
    normed = F.rms_norm(read.float(), read.shape[1:], None, weights.eps).to(read.dtype)
    normed = (normed.float() * weights.output_norm).to(read.dtype)
    return (normed.float() * F.silu(z.view_as(normed).float())).to(read.dtype).flatten()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
