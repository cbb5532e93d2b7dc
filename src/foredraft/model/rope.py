"""Rotary position embeddings (RoPE, arXiv:2104.09864): parameters, scaling types and the rotation table.

Contract: the rotation of a position depends on that position alone, never on the pass, the batch or the
history. Scaling types:

    default   no scaling
    linear    positions are divided by a factor (arXiv:2306.15595)
    dynamic   the base grows past the trained length (dynamic NTK scaling, arXiv:2309.00071); a position has
              the base of a text that ends with it, as in decoding token by token
    yarn      frequencies are interpolated by channel (YaRN, arXiv:2309.00071)
    llama3    frequencies are interpolated by wavelength (arXiv:2407.21783)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_POSITIONS = 2**31 - 1  # the largest length that 32-bit positions can hold


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary parameters of one scaling type; a type ignores the parameters that it does not define.

    Attributes:
        kind: The scaling type, as in the table above.
        theta: The base of the frequencies.
        factor: The factor by which low frequencies, or positions, are divided.
        low_frequency: Below this many turns in `original_positions`, a frequency is divided by `factor`.
        high_frequency: Above this many turns in `original_positions`, a frequency is kept.
        original_positions: The trained length before scaling, in positions.
        attention_factor: The factor on cosines and sines.
        truncate: Whether YaRN rounds the bounds of its interpolation to whole channels.
    """

    kind: str
    theta: float
    factor: float = 1.0
    low_frequency: float = 1.0
    high_frequency: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    truncate: bool = True

    def usable_positions(self, trained: int) -> int:
        """Return how many positions a request may use.

        Args:
            trained: The model's `max_position_embeddings`.

        Returns:
            `trained`, or the scaled length if that is more.
        """
        if self.kind not in ("dynamic", "yarn"):
            return trained
        return max(trained, int(min(self.factor * self.original_positions, MAX_POSITIONS)))


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of channels, [D/2] in float32; unscaled for "dynamic"."""
    inverse = _inverse_frequencies(rope.theta, head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse)
    return inverse


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the rotation of every position, to be used as x * cos + roll(x, D/2) * sin.

    Args:
        rope: The rotary parameters.
        head_dim: D.
        positions: P, the positions of the table.
        device: The device of the table.
        dtype: The dtype of the table; angles are computed in float32.

    Returns:
        Cosines and signed sines, [P, 2, D].
    """
    position = torch.arange(positions, dtype=torch.float32)[:, None]
    if rope.kind == "dynamic":
        angles = position * _inverse_frequencies(_dynamic_theta(rope, head_dim, positions), head_dim)
    else:
        angles = position * frequencies(rope, head_dim)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor  # [P, D/2]
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
    return table.to(device=device, dtype=dtype)  # [P, 2, D]


def _inverse_frequencies(theta: float | Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D/2]
    return 1.0 / theta**exponents


def _dynamic_theta(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """Return the base of each position, [P, 1]: the base of a text that ends with it."""
    length = torch.arange(1, positions + 1).clamp(min=rope.original_positions)[:, None]
    stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Divide low frequencies by the factor; interpolate between the bounds by wavelength."""
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
    """Divide low frequencies by the factor; interpolate between the bounds by channel."""
    pairs = len(inverse)
    head_dim = 2 * pairs

    def channel_pair(turns: float) -> float:
        length = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    first, last = channel_pair(rope.high_frequency), channel_pair(rope.low_frequency)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # transformers widens an empty ramp by 0.001 too
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse / rope.factor * stretched + inverse * (1 - stretched)
