"""The decoder: embed, run any subset of sub-layers from any depth, head.

Contract: a `Decoder` is weights and their arithmetic, nothing else. It holds no cache, no mode and no record
of its passes: which sub-layers run is a `Plan`, what a pass attends to is a `Pass`, both arguments. Skipping
sub-layers of the very same object makes the self-drafter of Draft & Verify (arXiv:2309.08168); running it in
two stretches makes the early exits of LayerSkip (arXiv:2404.16710) and Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.model.attention import Pass, attend
from foredraft.model.layers import Product, RMSNorm, RowSpan, gate, product, soft_cap
from foredraft.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Plan:
    """Which sub-layers run."""

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]

    @classmethod
    def full(cls, layers: int) -> Plan:
        return cls((True,) * layers, (True,) * layers)

    def without(self, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Plan:
        """This plan less the named layers' attention and the named layers' MLP."""
        return Plan(_cleared(self.attention, attention), _cleared(self.mlp, mlp))


def _cleared(runs: tuple[bool, ...], skip: Iterable[int]) -> tuple[bool, ...]:
    skipped = frozenset(skip)
    if not skipped <= frozenset(range(len(runs))):
        raise ValueError(f"layers {sorted(skipped)} to skip are not all among the {len(runs)} layers")
    return tuple(run and layer not in skipped for layer, run in enumerate(runs))


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one attention sub-layer."""

    norm: RMSNorm
    qkv: Product
    output: Product
    post_norm: RMSNorm | None = None
    q_norm: RMSNorm | None = None  # of each head's query
    k_norm: RMSNorm | None = None  # of each head's key


@dataclass(frozen=True, slots=True)
class MLP:
    """Weights of one gated MLP sub-layer."""

    norm: RMSNorm
    gate_up: Product
    down: Product
    post_norm: RMSNorm | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: MLP


def project(spec: ModelSpec, weights: Attention, x: Tensor, span: RowSpan | None) -> Tensor:
    """Queries, keys and values of every state, not yet rotated: [N, D] -> [N, H + 2 * Hk, D]."""
    qkv = product(weights.qkv, weights.norm(x), span)
    qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = qkv[:, : spec.heads], qkv[:, spec.heads : spec.heads + spec.kv_heads]
        q.copy_(weights.q_norm(q))
        k.copy_(weights.k_norm(k))
    return qkv


def finish(
    spec: ModelSpec, layer: Layer, x: Tensor, attended: Tensor | None, mlp: bool, span: RowSpan | None
) -> Tensor:
    """States entering a layer [N, D] and what its heads attended to [N, H * D] -> states leaving it; None, or
    no `mlp`: that sub-layer is skipped."""
    if attended is not None:
        y = product(layer.attention.output, attended, span)
        x = x + (y if layer.attention.post_norm is None else layer.attention.post_norm(y))
    if mlp:
        gated = gate(spec.activation, product(layer.mlp.gate_up, layer.mlp.norm(x), span))
        y = product(layer.mlp.down, gated, span)
        x = x + (y if layer.mlp.post_norm is None else layer.mlp.post_norm(y))
    return x


@dataclass(frozen=True, slots=True)
class Steps:
    """A layer's work on each state by itself, whatever its place: before attention, and after it."""

    project: Callable[[ModelSpec, Attention, Tensor, RowSpan | None], Tensor]
    finish: Callable[[ModelSpec, Layer, Tensor, Tensor | None, bool, RowSpan | None], Tensor]


STEPS = Steps(project, finish)


RunLayers = Callable[[Tensor, Pass, Plan, int, int], Tensor]  # what `Decoder.run` is


class Decoder:
    """Weights only; shared freely between runners, drafters and threads."""

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, layers: tuple[Layer, ...], norm: RMSNorm, head: Product
    ) -> None:
        self.spec = spec
        self.embedding = embedding  # [V, D]
        self.layers = layers
        self.norm = norm
        self.output = head
        self.device = embedding.device
        self.dtype = embedding.dtype
        # the reference rounds the factor to the model's dtype before it multiplies
        scale = spec.embedding_scale
        self._scale = None if scale is None else torch.tensor(scale).to(self.device, self.dtype)
        self.embedding_scale = None if scale is None else float(torch.tensor(scale).to(self.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]"""
        hidden = F.embedding(tokens, self.embedding)
        return hidden if self._scale is None else hidden.mul_(self._scale)

    def run(
        self, hidden: Tensor, pass_: Pass, plan: Plan, start: int, stop: int, steps: Steps | None = None
    ) -> Tensor:
        """States entering layer `start` -> states entering layer `stop`, [B, T, D] or [N, D] both; `steps`
        stand in for the ones of this module."""
        spec, span, steps = self.spec, pass_.span, steps or STEPS
        x = hidden.reshape(-1, hidden.shape[-1])  # [N, D]
        for index in range(start, stop):
            layer = self.layers[index]
            attended = None
            if plan.attention[index]:
                attended = attend(spec, index, steps.project(spec, layer.attention, x, span), pass_)
            x = steps.finish(spec, layer, x, attended, plan.mlp[index], span)
        return x.view(hidden.shape)

    def head(self, hidden: Tensor, span: RowSpan | None = None) -> Tensor:
        """States after the last layer -> logits [..., V] in float32, the soft-cap included."""
        x = self.norm(hidden.reshape(-1, hidden.shape[-1]))  # [N, D]
        logits = product(self.output, x, span).float()  # [N, V]
        if self.spec.logit_softcap is not None:
            logits = soft_cap(logits, self.spec.logit_softcap)
        return logits.view(*hidden.shape[:-1], -1)
