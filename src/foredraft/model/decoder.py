"""The decoder: embedding, any range of layers with any subset of sub-layers, and the head.

A `Decoder` is weights and their arithmetic, without cache, mode or state of a pass: the `ForwardContext` says
which sub-layers run and what they attend to. With skipped sub-layers it is the self-drafter of Draft & Verify
(arXiv:2309.08168); run in two ranges of layers, it gives the early exits of LayerSkip (arXiv:2404.16710) and
Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import ForwardContext, attend
from foredraft.model.layers import (
    LayerInput,
    LayerInputs,
    Norm,
    Product,
    RowSource,
    RowSpan,
    activate,
    gate,
    product,
    soft_cap,
)
from foredraft.model.recurrent import Recurrence, mix
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Attention:
    norm: Norm | None
    qkv: Product  # queries, keys and values fused; without what the layer takes from elsewhere
    output: Product
    post_norm: Norm | None = None  # of the output, or of what entered plus the output
    q_norm: Norm | None = None  # applied to each head's query, or to all heads' together
    k_norm: Norm | None = None  # applied to each head's key, or to all heads' together
    v_norm: Norm | None = None  # applied to each head's value
    window: int | None = None  # of its layer, by which the spec knows its heads

    @property
    def products(self) -> list[Product]:
        return [self.qkv, self.output]

    def changed(self, change: Callable[[Product], Product]) -> Attention:
        return replace(self, qkv=change(self.qkv), output=change(self.output))


@dataclass(frozen=True, slots=True)
class MLP:
    norm: Norm | None
    gate_up: Product  # gate and up projections fused; the up projection alone in an MLP without a gate
    down: Product
    post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; that of an adapter may have no MLP, whatever the plan says."""

    attention: Attention | Recurrence
    mlp: MLP | None
    input: LayerInput | None = None  # takes what the layer gets of the tokens themselves
    scalar: float | Tensor = 1.0  # the factor on what leaves the layer; a tensor, [1], where it is trained

    @property
    def attending(self) -> Attention:
        """The weights of a layer that attends."""
        assert isinstance(self.attention, Attention)
        return self.attention

    @property
    def products(self) -> list[Product]:
        mlp = [] if self.mlp is None else [self.mlp.gate_up, self.mlp.down]
        inputs = [] if self.input is None else [self.input.gate, self.input.output]
        return [*self.attention.products, *mlp, *inputs]

    def changed(self, change: Callable[[Product], Product]) -> Layer:
        attention, mlp, own = self.attention.changed(change), self.mlp, self.input
        if mlp is not None:
            mlp = replace(mlp, gate_up=change(mlp.gate_up), down=change(mlp.down))
        if own is not None:
            own = replace(own, gate=change(own.gate), output=change(own.output))
        return replace(self, attention=attention, mlp=mlp, input=own)


def project(spec: ModelSpec, weights: Attention, x: Tensor, span: RowSpan | None) -> Tensor:
    """Return the queries, keys and values of hidden states [N, hidden], before rotation: [N, heads, D]."""
    window, heads = weights.window, spec.heads
    qkv = product(weights.qkv, x if weights.norm is None else weights.norm(x), span)
    qkv = qkv.view(x.shape[0], -1, spec.head_dim_of(window))
    if weights.q_norm is None:
        return qkv
    q, k = qkv[:, :heads], qkv[:, heads : heads + spec.kv_heads_of(window)]
    if not k.shape[1]:
        return weights.q_norm(q)
    v = k if spec.joins_values(window) else qkv[:, heads + k.shape[1] : heads + 2 * k.shape[1]]
    gates = qkv[:, heads + 2 * k.shape[1] :]  # none, but where attention is gated
    if spec.projection_norms and weights.k_norm is not None:
        q, k = weights.q_norm(q.flatten(1)).view_as(q), weights.k_norm(k.flatten(1)).view_as(k)
    else:
        q, k = weights.q_norm(q), k if weights.k_norm is None else weights.k_norm(k)
    return torch.cat([q, k, v if weights.v_norm is None else weights.v_norm(v), gates], 1)


def finish(
    spec: ModelSpec,
    layer: Layer,
    x: Tensor,
    attended: Tensor | None,
    mlp: bool,
    span: RowSpan | None,
    given: Tensor | None = None,
) -> Tensor:
    """Return the states [N, hidden] that leave a layer: its work after attention, `attended` [N, H * D]."""
    entering = x
    if attended is not None:
        y = product(layer.attention.output, attended, span)
        x = _added(spec, x, y, layer.attention.post_norm)
    if mlp and layer.mlp is not None:
        read = entering if spec.parallel_residual else x
        inner = product(layer.mlp.gate_up, read if layer.mlp.norm is None else layer.mlp.norm(read), span)
        inner = gate(spec.activation, inner) if spec.gated else activate(spec.activation, inner)
        x = _added(spec, x, product(layer.mlp.down, inner, span), layer.mlp.post_norm)
    if layer.input is not None and given is not None:
        x = layer.input.add(x, given, spec.activation, span)
    return x if layer.scalar == 1 else x * layer.scalar


def _added(spec: ModelSpec, x: Tensor, y: Tensor, post_norm: Norm | None) -> Tensor:
    if spec.sum_norms:
        return x + y if post_norm is None else post_norm(x + y)
    y = y if post_norm is None else post_norm(y)
    return x + (y if spec.residual_scale is None else y * spec.residual_scale)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The two position-wise parts of a layer, before and after its attention, eager or compiled."""

    project: Callable[[ModelSpec, Attention, Tensor, RowSpan | None], Tensor]
    finish: Callable[..., Tensor]


EAGER_PARTS = LayerParts(project, finish)  # the eager implementation


RunLayers = Callable[[Tensor, ForwardContext, int, int], Tensor]  # the signature of `Decoder.run`


@dataclass(eq=False, repr=False)
class Decoder:
    """The weights of a model and their arithmetic; runners, drafters and threads may share one."""

    spec: ModelSpec  # the model in numbers
    embedding: Tensor | RowSource  # token embeddings, [V, hidden], or the product whose rows they are
    layers: tuple[Layer, ...]  # the weights of the layers
    norm: Norm  # the final norm
    output: Product  # the linear layer of the head
    learned_positions: Tensor | None = None  # [positions, hidden]; added to embeddings
    inputs: LayerInputs | None = None  # makes what layers take of the tokens themselves

    def __post_init__(self) -> None:
        self.device, self.dtype = self.norm.weight.device, self.embedding.dtype
        scale = self.spec.embedding_scale
        # transformers rounds the factor to the model's dtype before it multiplies
        self.embedding_scale = None if scale is None else float(torch.tensor(scale).to(self.dtype))

    @property
    def products(self) -> list[Product]:
        inputs = [] if self.inputs is None else [self.inputs.projection]
        return [*inputs, *(product for layer in self.layers for product in layer.products), self.output]

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """Return the rows [..., hidden] of the embedding, without the factor, for token ids [...]."""
        rows = self.embedding
        return F.embedding(tokens, rows) if isinstance(rows, Tensor) else rows.rows(tokens)

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        hidden = self.embedding_rows(tokens)
        if self.embedding_scale is not None:
            hidden = hidden.mul_(self.embedding_scale)
        learned = self.learned_positions
        if learned is None:
            return hidden
        assert positions is not None
        # padding may lie past the last position
        return hidden + F.embedding(positions.clamp(max=len(learned) - 1), learned)

    def layer_inputs(self, tokens: Tensor, span: RowSpan | None = None) -> Tensor | None:
        """Return what each layer takes of tokens [...] themselves, [N, layers, I]; None in models without."""
        if self.inputs is None:
            return None
        flat = tokens.flatten()
        return self.inputs.of(flat, self.embed(flat), span)

    def run(
        self, hidden: Tensor, context: ForwardContext, start: int, stop: int, parts: LayerParts = EAGER_PARTS
    ) -> Tensor:
        """Run the layers `start` to `stop` - 1 on `hidden` [B, T, hidden], the plan's sub-layers of them."""
        spec, span, plan = self.spec, context.shape.span, context.shape.plan
        x = hidden.reshape(-1, hidden.shape[-1])  # [N, hidden]
        for index in range(start, stop):
            if not (plan.attention[index] or plan.mlp[index]):
                continue  # nothing of the layer runs
            layer = self.layers[index]
            attended = None
            if plan.attention[index]:
                attended = self._attended(index, x, context, parts)
            given = () if layer.input is None else (_input_of(context, index),)
            x = parts.finish(spec, layer, x, attended, plan.mlp[index], span, *given)
        return x.view(hidden.shape)

    def _attended(self, index: int, x: Tensor, context: ForwardContext, parts: LayerParts) -> Tensor:
        """Return what a layer's output projection reads: of attention, or of its recurrence."""
        spec, span, weights = self.spec, context.shape.span, self.layers[index].attention
        if isinstance(weights, Attention):
            return attend(spec, index, parts.project(spec, weights, x, span), context)
        assert context.cache.recurrent is not None and context.runs is not None
        projected, layer = weights.project(x, span), spec.recurrent_layers.index(index)
        return mix(weights, *projected, context.cache.recurrent, layer, context.runs)

    def head(self, hidden: Tensor, span: RowSpan | None = None) -> Tensor:
        x = self.norm(hidden.reshape(-1, hidden.shape[-1]))  # [N, hidden]
        logits = product(self.output, x, span).float()  # [N, V]
        if self.spec.logit_scale is not None:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = soft_cap(logits, self.spec.logit_softcap)
        return logits if hidden.dim() == 2 else logits.view(*hidden.shape[:-1], -1)


def _input_of(context: ForwardContext, layer: int) -> Tensor:
    assert context.layer_inputs is not None, "the pass has its tokens"
    return context.layer_inputs[:, layer]
