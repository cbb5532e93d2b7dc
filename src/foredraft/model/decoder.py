"""The decoder: embed, run any subset of sub-layers from any depth, head.

Contract: a `Decoder` is weights and their arithmetic, nothing else. It holds no cache, no mode and no record
of its passes: which sub-layers run is a `Plan`, what a pass attends to is a `Pass`, both arguments. Skipping
sub-layers of the very same object makes the self-drafter of Draft & Verify (arXiv:2309.08168); running it in
two stretches makes the early exits of LayerSkip (arXiv:2404.16710) and Kangaroo (arXiv:2404.18911).
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]"""
        hidden = F.embedding(tokens, self.embedding)
        return hidden if self._scale is None else hidden.mul_(self._scale)

    def run(self, hidden: Tensor, pass_: Pass, plan: Plan, start: int, stop: int) -> Tensor:
        """States entering layer `start` -> states entering layer `stop`, [B, T, D] both."""
        x = hidden.reshape(-1, hidden.shape[-1])  # [N, D]
        for index in range(start, stop):
            layer = self.layers[index]
            if plan.attention[index]:
                x = x + self._attention(layer.attention, x, index, pass_)
            if plan.mlp[index]:
                x = x + self._mlp(layer.mlp, x, pass_.span)
        return x.view(hidden.shape)

    def _attention(self, weights: Attention, x: Tensor, index: int, pass_: Pass) -> Tensor:
        spec = self.spec
        qkv = product(weights.qkv, weights.norm(x), pass_.span)
        qkv = qkv.view(len(x), spec.heads + 2 * spec.kv_heads, spec.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = qkv[:, : spec.heads], qkv[:, spec.heads : spec.heads + spec.kv_heads]
            q.copy_(weights.q_norm(q))
            k.copy_(weights.k_norm(k))
        y = product(weights.output, attend(spec, index, qkv, pass_), pass_.span)
        return y if weights.post_norm is None else weights.post_norm(y)

    def _mlp(self, weights: MLP, x: Tensor, span: RowSpan | None) -> Tensor:
        gated = gate(self.spec.activation, product(weights.gate_up, weights.norm(x), span))
        y = product(weights.down, gated, span)
        return y if weights.post_norm is None else weights.post_norm(y)

    def head(self, hidden: Tensor, span: RowSpan | None = None) -> Tensor:
        """States after the last layer -> logits [..., V] in float32, the soft-cap included."""
        x = self.norm(hidden.reshape(-1, hidden.shape[-1]))  # [N, D]
        logits = product(self.output, x, span).float()  # [N, V]
        if self.spec.logit_softcap is not None:
            logits = soft_cap(logits, self.spec.logit_softcap)
        return logits.view(*hidden.shape[:-1], -1)
