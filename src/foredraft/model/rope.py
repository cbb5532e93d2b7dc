"""Rotary positions: their parameters, and the table of rotations that a pass reads (arXiv:2104.09864).

Contract: the rotation of a position is a function of that position alone, never of the pass, the batch or the
history. Kinds: "default"; "linear", positions divided (arXiv:2306.15595); "dynamic", a base that grows with
the position past the trained length, as a model sees it that decodes token by token (NTK-aware scaling,
arXiv:2309.00071); "yarn" (the same paper); "llama3" (arXiv:2407.21783).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_POSITIONS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of one kind; those that it does not know keep their defaults."""

    kind: str
    theta: float
    factor: float = 1.0  # by which long waves, or positions, are stretched
    low_frequency: float = 1.0  # waves that turn less often than this in `original_positions` are stretched,
    high_frequency: float = 1.0  # those that turn more often than this are kept
    original_positions: int = 0  # the length before scaling
    attention_factor: float = 1.0  # on cosines and sines
    truncate: bool = True  # the bounds between stretched and kept waves fall on whole channels

    def reach(self, trained: int) -> int:
        """The positions that a model may use: those it was trained for, or what the scaling makes of them."""
        if self.kind not in ("dynamic", "yarn"):
            return trained
        return max(trained, int(min(self.factor * self.original_positions, MOST_POSITIONS)))


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angles per position of each pair of channels [D/2], in float32."""
    inverse = _inverse(rope.theta, head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse)
    return inverse


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of every position, made to be used as x * cos + roll(x, D/2) * sin."""
    position = torch.arange(positions, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        angles = position * _inverse(_grown_theta(rope, head_dim, positions), head_dim)
    else:
        angles = position * frequencies(rope, head_dim)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor  # [P, D/2]
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.to(device=device, dtype=dtype)  # [P, 2, D]


def _inverse(theta: float | Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D/2]
    return 1.0 / theta**exponents


def _grown_theta(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """The base at each position [P, 1]: that of a text which ends there."""
    length = torch.arange(1, positions + 1).clamp(min=rope.original_positions)[:, None]
    stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Waves between the bounds are blended by how often they turn."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_positions / rope.low_frequency
    shortest = rope.original_positions / rope.high_frequency
    blend = (rope.original_positions / wavelength - rope.low_frequency) / (
        rope.high_frequency - rope.low_frequency
    )
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, stretched)


def _yarn(rope: Rope, inverse: Tensor) -> Tensor:
    """Waves between the bounds are blended by their place among the channels."""
    pairs = len(inverse)
    head_dim = 2 * pairs

    def pair_that_turns(times: float) -> float:
        length = rope.original_positions / (times * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.high_frequency), pair_that_turns(rope.low_frequency)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)
