"""IQ1, IQ2 and IQ3: a number names several codes at once, those of a point of a grid.

Each function takes blocks [B, bytes] uint8 and the (rows, columns) of the weight that they make. A group of
codes has a scale in float32: an odd multiple of a fraction of d. The grids are in grids.safetensors, which
recipes/grids.py made.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.model.quantisation.blocks.bits import fields, float16, uint16, uint32
from foredraft.model.quantisation.blocks.plain import scaled
from foredraft.model.quantisation.codes import Codes

__all__ = ["FILE", "iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"]

FILE = Path(__file__).with_name("grids.safetensors")
EIGHTHS = 8  # the codes of IQ1 are a point's numbers plus or minus an eighth, times this


def iq2_xxs(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d; for each 32 codes 4 bytes that name points, 4 times 7 bits for signs, 4 bits of scale."""
    stored = blocks[:, 2:].reshape(-1, 8, 8)
    more = uint32(stored[..., 4:])
    codes = _points("iq2_xxs", stored[..., :4]) * _packed_signs(more)
    return scaled(codes, _halved(blocks[:, :2], more.flatten(1) >> 28, 0.25), rows, columns)


def iq2_xs(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, 32 numbers of 9 bits that name a point and 7 bits for signs, 16 scales of 4 bits."""
    stored = uint16(blocks[:, 2:66])
    codes = _points("iq2_xs", stored & 511) * _signs_of(stored >> 9)
    return scaled(codes, _halved(blocks[:, :2], _in_order(blocks[:, 66:], 4), 0.25), rows, columns)


def iq2_s(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, 32 bytes that name points, 32 of signs, 2 more bits of each name, 16 scales of 4 bits."""
    names = blocks[:, 2:34].int() | (_in_order(blocks[:, 66:74], 2).int() << 8)
    codes = _points("iq2_s", names) * _signs(blocks[:, 34:66])
    return scaled(codes, _halved(blocks[:, :2], _in_order(blocks[:, 74:], 4), 0.25), rows, columns)


def iq3_xxs(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, 64 bytes that name points; for each 32 codes 4 times 7 bits for signs, 4 bits of scale."""
    more = uint32(blocks[:, 66:])
    codes = _points("iq3_xxs", blocks[:, 2:66]).view(-1, 8, 4, 8) * _packed_signs(more)
    return scaled(codes, _halved(blocks[:, :2], more >> 28, 0.5), rows, columns)


def iq3_s(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, 64 bytes that name points, a ninth bit of each name, 32 of signs, 8 scales of 4 bits."""
    names = blocks[:, 2:66].int() | (_in_order(blocks[:, 66:74], 1).int() << 8)
    codes = _points("iq3_s", names).view(-1, 32, 8) * _signs(blocks[:, 74:106])
    return scaled(codes, _odd(float16(blocks[:, :2]), _in_order(blocks[:, 106:], 4)), rows, columns)


def iq1_s(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, 32 bytes that name points, and 8 numbers: 4 times 3 more bits of a name, a scale, a sign.

    The sign is that of the eighth that all codes of the group have besides.
    """
    more = uint16(blocks[:, 34:])
    names = blocks[:, 2:34].int() | ((_threes(more) & 7) << 8).flatten(1)
    shifts = 1 - 2 * (more >> 15)
    codes = _points("iq1", names).view(-1, 8, 32) * EIGHTHS + shifts[..., None]
    return scaled(codes, _odd(float16(blocks[:, :2]), (more >> 12) & 7) / EIGHTHS, rows, columns)


def iq1_m(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 32 bytes that name points, 4 bits for each: 3 of the name and a sign; scales and d in 8 bytes.

    The 8 bytes are 4 numbers: 4 scales of 3 bits, and 4 bits of d. The sign is that of the eighth that the 8
    codes of a point have besides.
    """
    more, stored = _in_order(blocks[:, 32:48], 4).int(), uint16(blocks[:, 48:])
    d = sum((stored[:, at] >> 12) << 4 * at for at in range(4))
    assert isinstance(d, Tensor)
    names = blocks[:, :32].int() | ((more & 7) << 8)
    codes = _points("iq1", names) * EIGHTHS + (1 - 2 * (more >> 3))[..., None]
    scales = _odd(d.short().view(torch.float16)[:, None], (_threes(stored) & 7).flatten(1))
    return scaled(codes, scales / EIGHTHS, rows, columns)


@functools.cache
def _grid(name: str) -> Tensor:
    """Return the points of a grid, [points, codes of a point] int8."""
    return load_file(FILE)[name]


def _points(name: str, numbers: Tensor) -> Tensor:
    """Return the codes [B, ..., codes of a point] of the points that numbers [B, ...] name, int8."""
    return _grid(name)[numbers.int()]


def _signs(packed: Tensor) -> Tensor:
    """Return 1 for each bit of bytes [...] that is 0, and -1 for others: [..., 8] int8, the lowest first."""
    return 1 - 2 * fields(packed[..., None], 1)[..., 0].to(torch.int8)


def _signs_of(numbers: Tensor) -> Tensor:
    """Return the 8 signs that 7 bits stand for: the eighth makes the number of negative ones even."""
    odd = fields(numbers.to(torch.uint8)[..., None], 1)[..., 0].sum(-1) & 1
    return _signs((numbers | (odd << 7)).to(torch.uint8))


def _packed_signs(packed: Tensor) -> Tensor:
    """Return the signs [B, 8, 4, 8] that the low 28 bits of numbers [B, 8(, 1)] hold, four times 7 bits."""
    shifts = torch.tensor([0, 7, 14, 21], device=packed.device)
    return _signs_of((packed.reshape(-1, 8, 1) >> shifts) & 127)


def _in_order(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of so many bits in bytes [B, N], byte after byte: [B, N * 8 / bits]."""
    return fields(packed, bits).transpose(1, 2).flatten(1)


def _threes(packed: Tensor) -> Tensor:
    """Return numbers [B, N] shifted by 0, 3, 6 and 9 bits, [B, N, 4]."""
    return packed[..., None] >> torch.tensor([0, 3, 6, 9], dtype=packed.dtype, device=packed.device)


def _halved(d: Tensor, numbers: Tensor, factor: float) -> Tensor:
    """Return d (1/2 + number) factor, for d in two bytes."""
    return float16(d).float() * (numbers.float() + 0.5) * factor


def _odd(d: Tensor, numbers: Tensor) -> Tensor:
    """Return d (2 number + 1)."""
    return d.float() * (numbers.float() * 2 + 1)
