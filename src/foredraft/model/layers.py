"""The parts of a decoder that see one position at a time: products, norms, activations.

Contract: weights only, no run state. What decides bits but not meaning (how many rows a product may see at
once) arrives as an argument, the `RowSpan` of the pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Row counts at which a product gives each row the same bits: multiples of `step` in [low, high]."""

    low: int
    high: int
    step: int = 1

    def padded(self, rows: int) -> int:
        """The smallest agreeing row count that holds `rows` (at most `high`) rows."""
        return max(self.low, math.ceil(rows / self.step) * self.step)


class Product(Protocol):
    """x [N, K] times a weight, plus its bias."""

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def dense(self) -> Tensor:
        """The weight as an ordinary [M, K] tensor, a copy where it is stored otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """The product on an ordinary weight."""

    weight: Tensor  # [M, K]
    bias: Tensor | None = None  # [M]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight


def product(linear: Product, x: Tensor, span: RowSpan | None) -> Tensor:
    """`linear(x)` at row counts within the span: too few rows are padded up, too many are cut into pieces."""
    rows = x.shape[0]
    if span is None:
        return linear(x)
    if rows > span.high:
        pieces = math.ceil(rows / span.high)
        return torch.cat([product(linear, piece, span) for piece in x.chunk(pieces)])
    padded = span.padded(rows)
    if padded == rows:
        return linear(x)
    return linear(F.pad(x, (0, 0, 0, padded - rows)))[:rows]


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square norm, arXiv:1910.07467, its statistics in float32.

    Llama rounds to the model's dtype before the weight; `offset` is Gemma's order: weight and product in
    float32.
    """

    weight: Tensor  # [D], of a state or of one head; with `offset` it holds 1 + weight, in float32
    eps: float
    offset: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, shape, self.weight, self.eps)
        if self.offset:
            return F.rms_norm(x.float(), shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, shape, None, self.eps) * self.weight


def gate(activation: str, gate_up: Tensor) -> Tensor:
    """The gated activation on [N, 2 * I]: act(first half) times the second."""
    first, second = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(first).mul_(second)
    return F.gelu(first, approximate="tanh").mul_(second)


def soft_cap(x: Tensor, cap: float, scale: float = 1.0) -> Tensor:
    """cap * tanh(scale * x / cap), in place: the values stay within (-cap, cap)."""
    return x.mul_(scale / cap).tanh_().mul_(cap)
