"""The decoder: embedding, any range of layers with any subset of sub-layers, and the head.

Contract: a `Decoder` is weights and their arithmetic. It holds no cache, no mode and no state of a pass: the
`ForwardContext` argument says which sub-layers run and what they attend to. The same object with skipped
sub-layers is the self-drafter of Draft & Verify (arXiv:2309.08168); run in two ranges of layers, it
gives the early exits of LayerSkip (arXiv:2404.16710) and Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import attend
from foredraft.model.forward_context import ForwardContext
from foredraft.model.layers import Product, RMSNorm, RowSource, RowSpan, gate, product, soft_cap
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one attention sub-layer."""

    norm: RMSNorm
    qkv: Product  # queries, keys and values fused
    output: Product
    post_norm: RMSNorm | None = None
    q_norm: RMSNorm | None = None  # applied to each head's query
    k_norm: RMSNorm | None = None  # applied to each head's key


@dataclass(frozen=True, slots=True)
class MLP:
    """The weights of one gated MLP sub-layer."""

    norm: RMSNorm
    gate_up: Product  # gate and up projections fused
    down: Product
    post_norm: RMSNorm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; that of an adapter may have no MLP, whatever the plan says."""

    attention: Attention
    mlp: MLP | None

    @property
    def products(self) -> list[Product]:
        """Its linear layers, in the order in which they run."""
        mlp = [] if self.mlp is None else [self.mlp.gate_up, self.mlp.down]
        return [self.attention.qkv, self.attention.output, *mlp]


def project(spec: ModelSpec, weights: Attention, x: Tensor, span: RowSpan | None) -> Tensor:
    """Return the queries, keys and values of every hidden state, before rotation.

    Args:
        spec: The model.
        weights: The attention sub-layer.
        x: The hidden states that enter the layer, [N, hidden].
        span: The row counts at which products are batch-invariant.

    Returns:
        Queries, keys and values side by side, [N, H + 2 * Hk, D].
    """
    qkv = product(weights.qkv, weights.norm(x), span)
    qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = qkv[:, : spec.heads], qkv[:, spec.heads : spec.heads + spec.kv_heads]
        qkv = torch.cat([weights.q_norm(q), weights.k_norm(k), qkv[:, spec.heads + spec.kv_heads :]], 1)
    return qkv


def finish(
    spec: ModelSpec, layer: Layer, x: Tensor, attended: Tensor | None, mlp: bool, span: RowSpan | None
) -> Tensor:
    """Return the hidden states that leave a layer: the rest of its work after attention.

    Args:
        spec: The model.
        layer: The layer.
        x: The hidden states that enter the layer, [N, hidden].
        attended: The output of the attention heads, [N, H * D]; None skips the attention sub-layer.
        mlp: Whether the MLP sub-layer runs.
        span: The row counts at which products are batch-invariant.

    Returns:
        Hidden states, [N, hidden].
    """
    if attended is not None:
        y = product(layer.attention.output, attended, span)
        x = x + (y if layer.attention.post_norm is None else layer.attention.post_norm(y))
    if mlp and layer.mlp is not None:
        gated = gate(spec.activation, product(layer.mlp.gate_up, layer.mlp.norm(x), span))
        y = product(layer.mlp.down, gated, span)
        x = x + (y if layer.mlp.post_norm is None else layer.mlp.post_norm(y))
    return x


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The two position-wise parts of a layer, before and after its attention, eager or compiled."""

    project: Callable[[ModelSpec, Attention, Tensor, RowSpan | None], Tensor]
    finish: Callable[[ModelSpec, Layer, Tensor, Tensor | None, bool, RowSpan | None], Tensor]


EAGER_PARTS = LayerParts(project, finish)  # the eager implementation


RunLayers = Callable[[Tensor, ForwardContext, int, int], Tensor]  # the signature of `Decoder.run`


class Decoder:
    """The weights of a model and their arithmetic; runners, drafters and threads may share one.

    Attributes:
        spec: The model in numbers.
        embedding: Token embeddings, [V, hidden], or the product whose rows they are.
        layers: The weights of the layers.
        norm: The final norm.
        output: The linear layer of the head.
        embedding_scale: The factor on embeddings, rounded to `dtype`; None for no factor.
    """

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor | RowSource,
        layers: tuple[Layer, ...],
        norm: RMSNorm,
        head: Product,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = head
        self.device = norm.weight.device
        self.dtype = embedding.dtype
        # transformers rounds the factor to the model's dtype before it multiplies
        scale = spec.embedding_scale
        self._scale = None if scale is None else torch.tensor(scale).to(self.device, self.dtype)
        self.embedding_scale = None if scale is None else float(torch.tensor(scale).to(self.dtype))

    @property
    def products(self) -> list[Product]:
        """Its linear layers, the head last."""
        return [*(product for layer in self.layers for product in layer.products), self.output]

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows [..., hidden] of the embedding, without the factor, for token ids [...]."""
        rows = self.embedding
        return F.embedding(tokens, rows) if isinstance(rows, Tensor) else rows.rows(tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the hidden states [B, T, hidden] that enter layer 0, for token ids [B, T]."""
        hidden = self.embedding_rows(tokens)
        return hidden if self._scale is None else hidden.mul_(self._scale)

    def run(
        self,
        hidden: Tensor,
        context: ForwardContext,
        start: int,
        stop: int,
        parts: LayerParts = EAGER_PARTS,
    ) -> Tensor:
        """Run the layers `start` up to, not including, `stop`, of the sub-layers in the plan of the pass.

        Args:
            hidden: The hidden states that enter layer `start`, [B, T, hidden] or [N, hidden].
            context: What all layers of the pass share.
            start: The first layer.
            stop: The layer after the last.
            parts: The implementation of the position-wise parts.

        Returns:
            The hidden states that enter layer `stop`, in the shape of `hidden`.
        """
        spec, span, plan = self.spec, context.shape.span, context.shape.plan
        x = hidden.reshape(-1, hidden.shape[-1])  # [N, hidden]
        for index in range(start, stop):
            layer = self.layers[index]
            attended = None
            if plan.attention[index]:
                attended = attend(spec, index, parts.project(spec, layer.attention, x, span), context)
            x = parts.finish(spec, layer, x, attended, plan.mlp[index], span)
        return x.view(hidden.shape)

    def head(self, hidden: Tensor, span: RowSpan | None = None) -> Tensor:
        """Return the logits of hidden states.

        Args:
            hidden: The hidden states that leave the last layer, [..., hidden].
            span: The row counts at which products are batch-invariant.

        Returns:
            Logits [..., V] in float32, soft-capped where the model is.
        """
        x = self.norm(hidden.reshape(-1, hidden.shape[-1]))  # [N, hidden]
        logits = product(self.output, x, span).float()  # [N, V]
        if self.spec.logit_softcap is not None:
            logits = soft_cap(logits, self.spec.logit_softcap)
        return logits if hidden.dim() == 2 else logits.view(*hidden.shape[:-1], -1)
