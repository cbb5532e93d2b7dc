"""The parts of a decoder that work on one position at a time: products, norms, activations, inputs of the
tokens.

They hold weights only, no run state. The number of rows in a product changes the bits of its result, not its
meaning; the `RowSpan` argument restricts that number.

OPT 350M (arXiv:2205.01068) has projections behind its embedding and before its head. Two products without
anything between them are one, so the decoder has both as [V, hidden], computed in float32 and rounded once.
In Gemma 4, a token's embedding in every layer and a projection of the one that enters layer 0 enter each
layer through a gate, so a pass from above layer 0 needs its tokens, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import broken
from foredraft.model.quantisation.scheme import ActivationFormat
from foredraft.model.safetensors_file import StoredTensor
from foredraft.model.tensor_names import EMBEDDING, HEAD, Naming


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The row counts at which a product is batch-invariant: multiples of `step` in [low, high]."""

    low: int
    high: int
    step: int = 1

    def padded(self, rows: int) -> int:
        """Return the smallest row count of the span that holds `rows` rows, which are at most `high`."""
        return max(self.low, math.ceil(rows / self.step) * self.step)


class RowSource(Protocol):
    """A product that gives rows of its weight, so that an embedding which is tied to a head needs no copy."""

    @property
    def dtype(self) -> torch.dtype: ...
    def rows(self, ids: Tensor) -> Tensor: ...  # rows [..., K] of the weight [M, K], of ids [...]


class Product(Protocol):
    """A linear layer: x [N, K] times a weight [M, K], plus its bias."""

    @property
    def bias(self) -> Tensor | None: ...  # in the product's own layout
    @property
    def shape(self) -> tuple[int, int]: ...  # (M, K) of the weight
    def __call__(self, x: Tensor) -> Tensor: ...  # [N, M]
    def dense(self) -> Tensor: ...  # the weight [M, K], copied if it is stored in another layout


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor  # [M, K]
    bias: Tensor | None = None  # [M]
    inputs: ActivationFormat | None = None  # the numbers that x is rounded to first; None leaves it as it is

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x if self.inputs is None else self.inputs.rounded(x), self.weight, self.bias)

    def dense(self) -> Tensor:
        return self.weight


def product(linear: Product, x: Tensor, span: RowSpan | None) -> Tensor:
    """Return `linear(x)` of x [N, K], computed only at row counts of the span."""
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
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gate(activation: str, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up, [N, I], from both projections side by side, [N, 2 * I]."""
    gate_half, up_half = gate_up.chunk(2, dim=-1)
    gated = activate(activation, gate_half)
    # where ReLU is trained through, its result stays, because its gradient needs it
    return gated * up_half if activation == "relu" else gated.mul_(up_half)


def soft_cap(x: Tensor, cap: float, scale: float = 1.0) -> Tensor:
    """Replace x by cap * tanh(scale * x / cap), in place unless x is trained through, for its gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        return torch.tanh(x * (scale / cap)) * cap
    return x.mul_(scale / cap).tanh_().mul_(cap)


@dataclass(frozen=True, slots=True)
class PairInputs:
    """How pairs enter the first layer of a head; nothing attends to the pair at position 0."""

    token_norm: Norm | None  # of the embedding; None leaves it as it is
    state_norm: Norm | None  # of the state, likewise
    # makes the state that enters the first layer, of both halves; None: the layer's projections read both
    join: Product | None
    normed_residual: bool  # it adds that to the normed state
    normed_output: bool  # the state of the pair after is the last layer's output after the final norm
    final_norm: bool  # the decoder's final norm is the head's; otherwise it has none


PROJECTIONS = {"project_in": "model.project_in", "project_out": "model.project_out"}  # outer, of a layout
TABLE, HEAD_TABLE, INWARD, OUTWARD = (f"{name}.weight" for name in (EMBEDDING, HEAD, *PROJECTIONS.values()))


@dataclass(frozen=True)
class ProjectedLayout(Naming):
    """A layout whose embedding and head are stored narrow, with a projection each."""

    tied: bool = True  # the head's stored table is that of the embedding

    @property
    def written_keys(self) -> dict[str, Any]:
        return {"word_embed_proj_dim": None, "tie_word_embeddings": False}

    def opened(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        tensors, head = super().opened(stored), TABLE if self.tied else HEAD_TABLE
        for name in (TABLE, INWARD, OUTWARD, head):
            if name not in tensors:
                raise broken(f"tensor {self.stored_name(name)} is missing from the checkpoint")
        both = [
            tensors[name].whole().float() for name in (HEAD_TABLE, TABLE) if self.tied and name in tensors
        ]
        if len(both) > 1 and not torch.equal(*both):
            problem = f"tensor {HEAD_TABLE} differs from {TABLE}, but config.json ties them"
            raise CheckpointError(problem, remedy="correct tie_word_embeddings")
        others = {name: tensor for name, tensor in tensors.items() if name not in (INWARD, OUTWARD)}
        written = folded(tensors[head], tensors[OUTWARD], outward=True)
        return others | {TABLE: folded(tensors[TABLE], tensors[INWARD]), HEAD_TABLE: written}


def folded(table: StoredTensor, projection: StoredTensor, *, outward: bool = False) -> StoredTensor:
    """Return a table [V, E] times a projection [hidden, E], or [E, hidden] if outward."""

    def read(rows: slice | None) -> Tensor:
        values = projection.whole().float()
        return table[rows or slice(None)].float() @ (values if outward else values.T)

    hidden = projection.shape[1 if outward else 0]
    return replace(table, dtype="F32", shape=(table.shape[0], hidden), read=read)


HALF = 2.0**-0.5  # the factor on the sum of two inputs of size one


@dataclass(frozen=True, slots=True)
class LayerInputs:
    table: Tensor  # the embedding of every token in every layer, [tokens, layers * I]
    scale: float  # the factor on it, rounded to the dtype
    projection: Product  # projects the embedding that enters layer 0 to [layers * I]
    projection_scale: float  # the factor on what it projects
    norm: Norm  # the norm of each layer's share of that

    @property
    def size(self) -> int:
        return self.norm.weight.shape[0]

    @property
    def layers(self) -> int:
        return self.table.shape[1] // self.size

    def of(self, tokens: Tensor, embedded: Tensor, span: RowSpan | None) -> Tensor:
        """Return the inputs of all layers [N, layers, I], of tokens [N] and of what enters layer 0."""
        own = (F.embedding(tokens, self.table) * self.scale).view(len(tokens), -1, self.size)
        projected = product(self.projection, embedded, span) * self.projection_scale
        return (self.norm(projected.view(own.shape)) + own) * HALF


@dataclass(frozen=True, slots=True)
class LayerInput:
    gate: Product  # projects the states to I gates
    output: Product  # projects the gated input to the states
    norm: Norm  # the norm of what it adds

    def add(self, x: Tensor, given: Tensor, activation: str, span: RowSpan | None) -> Tensor:
        gated = activate(activation, product(self.gate, x, span)) * given
        return x + self.norm(product(self.output, gated, span))
