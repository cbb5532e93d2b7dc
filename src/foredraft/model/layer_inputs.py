"""Layer inputs: what each layer takes of the tokens themselves, beside the states (Gemma 4's E2B and E4B).

A token has an embedding of its own in every layer (a row of `table`), and the embedding that enters layer 0
is projected for every layer. Their sum enters each layer through a gate, after its MLP. So a pass that starts
above layer 0 needs its tokens, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foredraft.model.layers import Norm, Product, RowSpan, activate, product

__all__ = ["LayerInput", "LayerInputs"]

HALF = 2.0**-0.5  # the factor on the sum of two inputs of size one


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The weights that make the inputs of all layers.

    Attributes:
        table: The embedding of every token in every layer, [tokens, layers * I].
        scale: The factor on it, rounded to the dtype.
        projection: Projects the embedding that enters layer 0 to [layers * I].
        projection_scale: The factor on what it projects.
        norm: The norm of each layer's share of that.
    """

    table: Tensor
    scale: float
    projection: Product
    projection_scale: float
    norm: Norm

    @property
    def size(self) -> int:
        """I, the size of a layer's input."""
        return self.norm.weight.shape[0]

    @property
    def layers(self) -> int:
        """The layers that have inputs."""
        return self.table.shape[1] // self.size

    def of(self, tokens: Tensor, embedded: Tensor, span: RowSpan | None) -> Tensor:
        """Return the inputs of all layers, [N, layers, I].

        Args:
            tokens: Token ids, [N].
            embedded: Their embeddings as they enter layer 0, [N, hidden].
            span: The row counts at which products are batch-invariant.
        """
        own = (F.embedding(tokens, self.table) * self.scale).view(len(tokens), -1, self.size)
        projected = product(self.projection, embedded, span) * self.projection_scale
        return (self.norm(projected.view(own.shape)) + own) * HALF


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The weights by which a layer takes its input.

    Attributes:
        gate: Projects the states to I gates.
        output: Projects the gated input to the states.
        norm: The norm of what it adds.
    """

    gate: Product
    output: Product
    norm: Norm

    def add(self, x: Tensor, given: Tensor, activation: str, span: RowSpan | None) -> Tensor:
        """Return states [N, hidden] with the input [N, I] of the layer."""
        gated = activate(activation, product(self.gate, x, span)) * given
        return x + self.norm(product(self.output, gated, span))
