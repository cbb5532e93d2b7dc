"""Two attention layers built by hand: what follows the last place where this token stood?

Contract: `insert` puts a previous-token layer and an induction layer in front of a trained decoder. The
first writes a code of the token before and of the token itself into directions that nothing else uses;
the second attends to places whose *previous* token is like this one and adds the embedding found there.
Small models of code need this circuit most and find it last; training goes on from here.

Induction heads: Olsson et al., arXiv:2209.11895.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .model import ModelShape

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Circuit:
    """Strengths of the circuit, in nats of attention or units of the residual stream."""

    code: int = 28  # dimensions of a token's code
    position: float = 5.0  # attention gap between the wanted offset and its neighbours
    match: float = 18.0  # attention score of equal codes
    write: float = 0.2  # size of a code in the residual stream
    copy: float = 0.5  # share of the found embedding that is added


def rotation_pairs(shape: ModelShape) -> Tensor:
    half = shape.head_dim // 2
    return shape.rope_theta ** (-torch.arange(half) / half)  # [D / 2]


def position_head(shape: ModelShape, constant: Tensor, level: float, offset: int, gap: float) -> tuple[Tensor, Tensor]:
    """Query and key matrices that attend `offset` places back, whatever the tokens.

    `constant` is a unit direction on which every normalised input has a component of about `level`.
    """
    half = shape.head_dim // 2
    speeds = rotation_pairs(shape)[: half // 2]
    size = (gap / (1 - speeds.cos()).sum() * shape.head_dim**0.5) ** 0.5 / level
    query, key = torch.zeros(shape.head_dim), torch.zeros(shape.head_dim)
    index = torch.arange(len(speeds))
    query[index] = size * (offset * speeds).cos()
    query[half + index] = -size * (offset * speeds).sin()
    key[index] = size
    return torch.outer(query, constant), torch.outer(key, constant)  # [D, C]


def insert(weights: Weights, counts: Tensor, shape: ModelShape, circuit: Circuit = Circuit(), seed: int = 0) -> Weights:
    """The weights of a decoder with two layers more; `counts` are token frequencies."""
    width, size, code = shape.width, shape.head_dim, circuit.code
    generator = torch.Generator().manual_seed(seed)
    share = (counts.float() + 1) / (counts.float() + 1).sum()
    # Directions of least variance become the codes' own: everything else stops using them.
    embed = weights["embed"]
    centred = embed - embed.mean(0)
    spare = torch.linalg.eigh(centred.t() @ centred)[1][:, : 2 * code]  # [C, 2K]
    clear = torch.eye(width) - spare @ spare.t()
    embed = embed @ clear
    normal = embed * (width / embed.pow(2).sum(1, keepdim=True)).sqrt()
    mean = (share[:, None] * normal).sum(0)
    level, constant = mean.norm().item(), mean / mean.norm()
    spread = (normal - mean) * share.sqrt()[:, None]
    values, vectors = torch.linalg.eigh(spread.t() @ spread)
    top = vectors.flip(1)
    encode = (top[:, :code] / values.flip(0)[:code].sqrt()).t()  # [K, C], unit variance
    encode = encode - torch.outer(encode @ constant, constant)

    def blank() -> Weights:
        std = 0.5 * width**-0.5
        return {
            "attention_norm": torch.ones(width),
            "qkv": torch.randn(3 * width, width, generator=generator) * std,
            "out": torch.zeros(width, width),
            "mlp_norm": torch.ones(width),
            "gate_up": torch.randn(2 * shape.mlp, width, generator=generator) * std,
            "down": torch.zeros(width, shape.mlp),
        }

    previous, induction = blank(), blank()
    q, k, v = previous["qkv"].view(3, shape.heads, size, width)
    for head, offset in enumerate((1, 0)):
        q[head], k[head] = position_head(shape, constant, level, offset, circuit.position)
        v[head] = 0
        v[head, :code] = encode
        columns = slice(head * size, head * size + code)
        previous["out"][:, columns] = circuit.write * spare[:, head * code : (head + 1) * code]
    # After that layer a code's coordinate has about this size once normalised.
    total = (embed.pow(2).sum(1) * share).sum() + 2 * code * circuit.write**2
    seen = circuit.write * (width / total).sqrt().item()
    strength = (circuit.match * size**0.5 / code) ** 0.5 / seen
    half = size // 2
    slow = torch.cat([torch.arange(half - code // 2, half), torch.arange(size - code // 2, size)])
    q, k, v = induction["qkv"].view(3, shape.heads, size, width)
    basis = top - torch.outer(constant, constant @ top)  # all identities, the constant left out
    back = (total / width).sqrt().item() * circuit.copy
    for head in range(shape.heads):
        mix = torch.linalg.qr(torch.randn(code, code, generator=generator))[0]
        q[head], k[head] = 0, 0
        q[head, slow] = strength * mix @ spare[:, code:].t()
        k[head, slow] = strength * mix @ spare[:, :code].t()
        part = basis[:, head * size : (head + 1) * size] if head * size < width else None
        if part is not None:
            v[head] = part.t() @ clear
            induction["out"][:, head * size : (head + 1) * size] = back * clear @ part
    grown: Weights = {"embed": embed, "norm": weights["norm"].clone()}
    for index, layer in enumerate((previous, induction)):
        grown |= {f"layers.{index}.{part}": weight for part, weight in layer.items()}
    for name, weight in weights.items():
        if name.startswith("layers."):
            _, index, part = name.split(".")
            if part in ("qkv", "gate_up"):
                norm = weights[f"layers.{index}.{'attention' if part == 'qkv' else 'mlp'}_norm"]
                # The input is scaled per dimension by the norm's weight before it reaches the matrix.
                weight = ((weight * norm) @ clear) / norm
            elif part in ("out", "down"):
                weight = clear @ weight
            grown[f"layers.{int(index) + 2}.{part}"] = weight.clone()
    return grown
