"""The parts of a decoder that work on one position at a time: products, norms, activations.

Contract: weights only, no run state. The number of rows in a product changes the bits of its result, not its
meaning; the `RowSpan` argument restricts that number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.quantisation.activations import ActivationFormat


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The row counts at which a product is batch-invariant: multiples of `step` in [low, high].

    BLAS chooses its kernel by the number of rows, so a row alone and the same row in a batch may differ in
    bits. Within a span they do not.
    """

    low: int
    high: int
    step: int = 1

    def padded(self, rows: int) -> int:
        """Return the smallest row count of the span that holds `rows` rows, which are at most `high`."""
        return max(self.low, math.ceil(rows / self.step) * self.step)


class RowSource(Protocol):
    """A product that gives rows of its weight, so that an embedding which is tied to a head needs no copy."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its rows."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [..., K] of the weight [M, K], of ids [...]."""
        ...


class Product(Protocol):
    """A linear layer: x [N, K] times a weight [M, K], plus its bias."""

    @property
    def bias(self) -> Tensor | None:
        """Its bias, in the product's own layout; None if it has none."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [N, M]."""
        ...

    def dense(self) -> Tensor:
        """Return the weight as an ordinary [M, K] tensor, copied if it is stored in another layout."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer whose weight is an ordinary tensor."""

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


@dataclass(frozen=True, slots=True)
class QuantisedInputs:
    """A linear layer that rounds its inputs first."""

    linear: Product
    format: ActivationFormat

    @property
    def shape(self) -> tuple[int, int]:
        return self.linear.shape

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.format.rounded(x))

    def dense(self) -> Tensor:
        return self.linear.dense()


def product(linear: Product, x: Tensor, span: RowSpan | None) -> Tensor:
    """Return `linear(x)`, computed only at row counts of the span.

    Args:
        linear: The linear layer.
        x: The input rows, [N, K].
        span: The row counts at which the product is batch-invariant: too few rows are padded, too many are
            split. None allows any.

    Returns:
        The product, [N, M].
    """
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
    """Root mean square norm with statistics in float32 (arXiv:1910.07467).

    Llama rounds to the model's dtype before it multiplies by the weight. Gemma and OLMo (`offset`) multiply
    in float32 and round last, Gemma before its fourth version by 1 + weight.
    """

    weight: Tensor  # [D] of a hidden state, of one head or of all; with `offset`, in float32, the 1 added
    eps: float
    offset: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, shape, self.weight, self.eps)
        if self.offset:
            return F.rms_norm(x.float(), shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, shape, None, self.eps) * self.weight


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm in float32, rounded last (arXiv:1607.06450)."""

    weight: Tensor  # [D] float32, of a hidden state or of one head; [H, D] of heads that differ
    bias: Tensor | None  # [D] float32
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return (F.layer_norm(x.float(), self.weight.shape[1:], eps=self.eps) * self.weight).to(x.dtype)
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


Norm: TypeAlias = RMSNorm | LayerNorm


def activate(activation: str, x: Tensor) -> Tensor:
    """Return the activation of every value.

    Args:
        activation: "silu", "relu", "gelu", or "gelu_tanh", GELU in its tanh approximation.
        x: The values.
    """
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gate(activation: str, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up, [N, I], from both projections side by side, [N, 2 * I]."""
    gate_half, up_half = gate_up.chunk(2, dim=-1)
    gated = activate(activation, gate_half)
    # where ReLU is trained through, its result stays, because its gradient needs it
    return gated * up_half if activation == "relu" else gated.mul_(up_half)


def soft_cap(x: Tensor, cap: float, scale: float = 1.0) -> Tensor:
    """Replace x by cap * tanh(scale * x / cap), in place, so that values stay within (-cap, cap).

    Where x is trained through, it stays, because its gradient needs it.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return torch.tanh(x * (scale / cap)) * cap
    return x.mul_(scale / cap).tanh_().mul_(cap)
