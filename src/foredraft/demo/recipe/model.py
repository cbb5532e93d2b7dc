"""The trainable decoder: exactly the Llama architecture, written for training speed on a CPU.

Contract: a `Decoder` built from a `ModelShape` computes what `transformers.LlamaForCausalLM` computes
with the same weights (RMSNorm, rotary positions with half rotation, gated SiLU MLP, tied head), and its
parameter names map one to one onto Hugging Face names (`export.py`). It adds what training wants: any
sub-layer may be left out of a pass, and the hidden state after any layer may be read by the shared head.

Layer dropout and early exit: LayerSkip, arXiv:2404.16710, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the size of a decoder."""

    vocab: int = 4096
    layers: int = 16
    width: int = 320
    heads: int = 5
    head_dim: int = 64
    mlp: int = 864
    positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


TARGET = ModelShape()
DRAFT = ModelShape(layers=2)


CHUNK = 256  # queries per attention product


class Rotary(NamedTuple):
    """Position tables of one pass."""

    cos: Tensor  # [T, D]
    sin: Tensor  # [T, D]
    mask: Tensor  # [P, P]


def rotary_table(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, each half repeated as Llama lays them out."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.positions).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)  # [T, D]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of queries or keys."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin  # [B, H, T, D]


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: statistics in float32, as every Llama does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def attend(
    x: Tensor, norm: Tensor, qkv: Tensor, out: Tensor, rotary: Rotary, heads: int, eps: float
) -> Tensor:
    """Causal self-attention with its norm and residual.

    Written as products over query chunks: without CPU matrix units this is 20 % faster, backward
    included, than PyTorch's fused attention, and the upper blocks are never computed.
    """
    batch, length, _ = x.shape
    size = qkv.shape[0] // (3 * heads)
    mixed = F.linear(normalise(x, norm, eps), qkv).view(batch, length, 3, heads, size)
    q, k, v = mixed.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, size).unbind(0)  # [BH, T, D]
    q = rotate(q, rotary.cos, rotary.sin) * size**-0.5
    k = rotate(k, rotary.cos, rotary.sin)
    reads = []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        scores = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2)) + rotary.mask[start:end, :end]
        reads.append(torch.bmm(torch.softmax(scores, dim=-1), v[:, :end]))
    read = torch.cat(reads, dim=1).view(batch, heads, length, size).transpose(1, 2)
    return x + F.linear(read.reshape(batch, length, heads * size), out)  # [B, T, C]


def feed(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Gated SiLU MLP with its norm and residual."""
    gate, up = F.linear(normalise(x, norm, eps), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)  # [B, T, C]


class Layer(nn.Module):
    """The weights of one layer; q, k and v are fused, and so are gate and up."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(shape.width))
        self.qkv = nn.Parameter(torch.empty(3 * shape.heads * shape.head_dim, shape.width))
        self.out = nn.Parameter(torch.empty(shape.width, shape.heads * shape.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(shape.width))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.mlp, shape.width))
        self.down = nn.Parameter(torch.empty(shape.width, shape.mlp))


class Decoder(nn.Module):
    """Token ids to hidden states; `head` turns hidden states into logits."""

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        future = torch.full((shape.positions, shape.positions), -1e9).triu(1)
        self.register_buffer("mask", future, persistent=False)
        self.attend, self.feed = attend, feed

    def compile(self) -> None:
        """Compile the two sub-layers, not the whole: one small graph each serves every layer and skip set."""
        self.attend = torch.compile(attend, dynamic=False)
        self.feed = torch.compile(feed, dynamic=False)

    def initialise(self, seed: int) -> None:
        """Normal weights; every residual branch starts at zero, so depth costs nothing at step 0.

        The embedding is also the output matrix: the final norm starts small to keep the logits small.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            std = 0.05 if name == "embed" else 0.5 * weight.shape[1] ** -0.5
            if name.endswith((".out", ".down")):
                std = 0.0
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * std)
        self.norm.data.fill_(0.4)

    def forward(
        self, ids: Tensor, skip: Collection[int] = (), tap: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the last layer and, if asked, after `tap` layers.

        Sub-layer 2l is the attention of layer l and 2l + 1 its MLP; those in `skip` are left out.
        """
        length, dtype, eps = ids.shape[1], self.embed.dtype, self.shape.norm_eps
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        rotary = Rotary(cos, sin, self.mask.to(dtype))
        x, tapped = F.embedding(ids, self.embed), None  # [B, T, C]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if 2 * index not in skip:
                x = self.attend(x, layer.attention_norm, layer.qkv, layer.out, rotary, self.shape.heads, eps)
            if 2 * index + 1 not in skip:
                x = self.feed(x, layer.mlp_norm, layer.gate_up, layer.down, eps)
            if index + 1 == tap:
                tapped = x
        return x, tapped

    def head(self, hidden: Tensor) -> Tensor:
        """Final norm and the tied output matrix."""
        return F.linear(normalise(hidden, self.norm, self.shape.norm_eps), self.embed)  # [B, T, V]
