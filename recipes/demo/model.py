"""The trainable decoder: the Llama architecture, written for training speed on a CPU.

A `Decoder` computes what `transformers.LlamaForCausalLM` computes with the same weights, whose names
`export.py` maps. It can leave out any sub-layer of a pass and return the hidden states after any layer: layer
dropout and early exit as in LayerSkip, arXiv:2404.16710, sections 4.1 and 4.2.
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
    """The sizes of a decoder."""

    vocab: int = 4096
    layers: int = 16
    width: int = 320
    heads: int = 5  # of attention; keys and values have as many
    head_dim: int = 64
    mlp: int = 864
    positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


TARGET = ModelShape()
DRAFT = ModelShape(layers=2)
QUERY_CHUNK = 256  # queries per attention product; the blocks above the diagonal of chunks are not computed
MASKED = -1e9  # added to the score of a future position: finite, and zero after the softmax


class PositionTables(NamedTuple):
    """Rotary tables and the causal mask of one pass."""

    cos: Tensor  # [T, D]
    sin: Tensor  # [T, D]
    mask: Tensor  # added to the attention scores, [positions, positions]


def rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions, [positions, D], with both halves of D equal as in Llama."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.positions).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)  # [T, D]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to queries or keys."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin  # [BH, T, D]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm with the statistics in float32, as Llama does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def attention_block(
    x: Tensor, norm: Tensor, qkv: Tensor, out: Tensor, tables: PositionTables, eps: float
) -> Tensor:
    """Apply causal self-attention with its norm and residual.

    On CPUs without matrix units, products over chunks of queries are 20 % faster than fused attention.
    """
    batch, length, _ = x.shape
    head_dim = tables.cos.shape[-1]
    heads = qkv.shape[0] // (3 * head_dim)
    fused = F.linear(rms_norm(x, norm, eps), qkv).view(batch, length, 3, heads, head_dim)
    q, k, v = fused.permute(2, 0, 3, 1, 4).reshape(3, batch * heads, length, head_dim).unbind(0)  # [BH, T, D]
    q = apply_rotary(q, tables.cos, tables.sin) * head_dim**-0.5
    k = apply_rotary(k, tables.cos, tables.sin)
    outputs = []
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        scores = torch.bmm(q[:, start:end], k[:, :end].transpose(1, 2)) + tables.mask[start:end, :end]
        outputs.append(torch.bmm(torch.softmax(scores, dim=-1), v[:, :end]))
    output = torch.cat(outputs, dim=1).view(batch, heads, length, head_dim).transpose(1, 2)
    return x + F.linear(output.reshape(batch, length, heads * head_dim), out)  # [B, T, C]


def mlp_block(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    """Apply the gated SiLU MLP with its norm and residual."""
    gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)  # [B, T, C]


class Layer(nn.Module):
    """The weights of one layer. Query, key and value matrices are fused, and so are gate and up."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.Parameter(torch.ones(shape.width))
        self.qkv = nn.Parameter(torch.empty(3 * shape.heads * shape.head_dim, shape.width))
        self.out = nn.Parameter(torch.empty(shape.width, shape.heads * shape.head_dim))
        self.mlp_norm = nn.Parameter(torch.ones(shape.width))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.mlp, shape.width))
        self.down = nn.Parameter(torch.empty(shape.width, shape.mlp))


class Decoder(nn.Module):
    """Map token ids to hidden states; `logits` maps hidden states to logits."""

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.width))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        mask = torch.full((shape.positions, shape.positions), MASKED).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.attention_block, self.mlp_block = attention_block, mlp_block

    def compile_sublayers(self) -> None:
        """Compile the two kinds of sub-layers: two small graphs serve every layer and set of skips."""
        self.attention_block = torch.compile(attention_block, dynamic=False)
        self.mlp_block = torch.compile(mlp_block, dynamic=False)

    def initialise(self, seed: int) -> None:
        """Draw the initial weights from a normal distribution.

        The matrices that end a residual branch start at zero, so each layer first computes the identity. The
        embedding is also the output matrix, so the final norm starts small to keep the logits small.
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
        self, ids: Tensor, skip: Collection[int] = (), exit_layer: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [B, T, C] after the last layer, and after `exit_layer` layers if given.

        Sub-layer 2l, which `skip` may hold, is the attention of layer l, sub-layer 2l + 1 its MLP.
        """
        length, dtype, eps = ids.shape[1], self.embed.dtype, self.shape.norm_eps
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        tables = PositionTables(cos, sin, self.mask.to(dtype))
        x, exit_hidden = F.embedding(ids, self.embed), None  # [B, T, C]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if 2 * index not in skip:
                x = self.attention_block(x, layer.attention_norm, layer.qkv, layer.out, tables, eps)
            if 2 * index + 1 not in skip:
                x = self.mlp_block(x, layer.mlp_norm, layer.gate_up, layer.down, eps)
            if index + 1 == exit_layer:
                exit_hidden = x
        return x, exit_hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the tied output matrix: [B, T, C] to [B, T, V]."""
        return F.linear(rms_norm(hidden, self.norm, self.shape.norm_eps), self.embed)
