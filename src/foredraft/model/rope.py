"""Rotary position embeddings (RoPE, arXiv:2104.09864): parameters, scaling types and the rotation table.

Contract: the rotation of a position depends on that position alone, never on the pass, the batch or the
history. Scaling types:

    default   no scaling
    linear    positions are divided by a factor (arXiv:2306.15595)
    dynamic   the base grows past the trained length (dynamic NTK scaling, arXiv:2309.00071); a position has
              the base of a text that ends with it, as in decoding token by token
    yarn      frequencies are interpolated by channel (YaRN, arXiv:2309.00071)
    llama3    frequencies are interpolated by wavelength (arXiv:2407.21783)
    proportional  a share of the channels rotates, with the frequencies that they have among all (Gemma 4)
    longrope  each frequency is divided by a factor of its own: a short one, or a long one in models that are
              loaded for texts past the trained length (LongRoPE, arXiv:2402.13753)

A head may be rotated in part: its first channels are, and the others stay as they are. What is rotated may
grow with its position (`Rope.growth`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_POSITIONS = 2**31 - 1  # the largest length that 32-bit positions can hold


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary parameters of one scaling type; a type ignores the parameters that it does not define."""

    kind: str  # the scaling type, as in the table above
    theta: float  # the base of the frequencies
    factor: float = 1.0  # the factor by which low frequencies, or positions, are divided
    # below this many turns in `original_positions`, a frequency is divided by `factor`
    low_frequency: float = 1.0
    high_frequency: float = 1.0  # above this many turns in `original_positions`, a frequency is kept
    original_positions: int = 0  # the trained length before scaling, in positions
    attention_factor: float = 1.0  # the factor on cosines and sines
    truncate: bool = True  # whether YaRN rounds the bounds of its interpolation to whole channels
    share: float = 1.0  # the share of a head's channels that is rotated
    factors: tuple[float, ...] = ()  # of longrope, the divisor of each frequency
    # the same for models that are loaded for texts past `original_positions`; `at_length` chooses
    long_factors: tuple[float, ...] = ()
    growth: float = 0.0  # what is rotated is multiplied by 1 + growth * ln(1 + floor(position / period))
    period: int = 1  # the positions of one step of this growth
    turning: float = 1.0  # of proportional, the share of the frequencies that are not 0

    def rotated(self, head_dim: int) -> int:
        """Return R, the channels of a head that are rotated."""
        return int(head_dim * self.share)

    def at_length(self, positions: int) -> Rope:
        if not self.long_factors:
            return self
        chosen = self.long_factors if positions > self.original_positions else self.factors
        return replace(self, factors=chosen, long_factors=())

    def usable_positions(self, trained: int) -> int:
        if self.kind not in ("dynamic", "yarn"):
            return trained
        return max(trained, int(min(self.factor * self.original_positions, MAX_POSITIONS)))


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of channels, [R/2] in float32; unscaled for "dynamic"."""
    inverse = _inverse_frequencies(rope.theta, rope.rotated(head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse)
    if rope.kind == "proportional":
        rotates = torch.arange(len(inverse)) < int(rope.turning * head_dim // 2)
        return torch.where(rotates, inverse / rope.factor, 0.0)
    if rope.kind == "longrope":
        return inverse / torch.tensor(rope.long_factors or rope.factors, dtype=torch.float32)
    return inverse


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the rotation of every position, to be used as x * cos + roll(x, R/2) * sin."""
    position = torch.arange(positions, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        rotated = rope.rotated(head_dim)
        angles = position * _inverse_frequencies(_dynamic_theta(rope, rotated, positions), rotated)
    else:
        angles = position * frequencies(rope, head_dim)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor  # [P, R/2]
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    if rope.growth:
        table *= _grown(rope, positions)[:, None, None]
    return table.to(device=device, dtype=dtype)  # [P, 2, R]


def _grown(rope: Rope, positions: int) -> Tensor:
    return 1 + rope.growth * torch.log(1 + torch.arange(positions) // rope.period)


def _inverse_frequencies(theta: float | Tensor, rotated: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated  # [R/2]
    return 1.0 / theta**exponents


def _dynamic_theta(rope: Rope, rotated: int, positions: int) -> Tensor:
    """Return the base of each position, [P, 1]: the base of a text that ends with it."""
    length = torch.arange(1, positions + 1).clamp(min=rope.original_positions)[:, None]
    stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
    return rope.theta * stretch ** (rotated / (rotated - 2))


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Divide low frequencies by the factor; interpolate between the bounds by wavelength."""
    wavelength = 2 * math.pi / inverse
    longest = rope.original_positions / rope.low_frequency
    shortest = rope.original_positions / rope.high_frequency
    width = rope.high_frequency - rope.low_frequency
    blend = (rope.original_positions / wavelength - rope.low_frequency) / width
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
    between = (wavelength <= longest) & (wavelength >= shortest)
    return torch.where(between, blended, stretched)


def _yarn(rope: Rope, inverse: Tensor) -> Tensor:
    """Divide low frequencies by the factor; interpolate between the bounds by channel."""
    pairs = len(inverse)
    rotated = 2 * pairs

    def channel_pair(turns: float) -> float:
        length = rope.original_positions / (turns * 2 * math.pi)
        return rotated * math.log(length) / (2 * math.log(rope.theta))

    first, last = channel_pair(rope.high_frequency), channel_pair(rope.low_frequency)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first or 0.001  # transformers widens an empty ramp by 0.001 too
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)
