"""Blocks with scales of their own, which stand beside the codes.

Each function takes blocks [B, bytes] uint8 and the (rows, columns) of the weight that they make. Codes lie
in halves, quarters or bits of bytes: those in the lowest bits come first (`bits.fields`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.model.quantisation.blocks.bits import fields, float16, int8
from foredraft.model.quantisation.codes import Codes, Coding, codebook_values

__all__ = [
    "IQ4_NL",
    "MXFP4",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "iq4_nl",
    "mxfp4",
    "nvfp4",
    "q1_0",
    "q2_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "scaled",
    "tq1_0",
    "tq2_0",
]

Q4_0, Q4_1 = Coding(4), Coding(4, unsigned=True, offsets=True)
Q5_0, Q5_1 = Coding(5), Coding(5, unsigned=True, offsets=True)
Q8_0 = Coding(8)
IQ4_NL, MXFP4 = Coding(4, codebook="iq4"), Coding(4, codebook="mxfp4")
POWERS = (1, 3, 9, 27, 81)  # of the digits of TQ1_0


def q4_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 codes of 4 bits, which are 8 too high."""
    codes = fields(blocks[:, 2:], 4).to(torch.int8) - 8
    return scaled(codes, float16(blocks[:, :2]), rows, columns, Q4_0)


def q4_1(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d and a minimum, float16; 32 codes of 4 bits."""
    codes = int8(fields(blocks[:, 4:], 4))
    return _above(codes, float16(blocks[:, :4]), rows, columns, Q4_1)


def q5_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, the fifth bits of 32 codes, their low bits; codes are 16 too high."""
    codes = _five_bits(blocks[:, 2:]) - 16
    return scaled(codes, float16(blocks[:, :2]), rows, columns, Q5_0)


def q5_1(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d and a minimum, float16; the fifth bits of 32 codes, their low bits."""
    codes = _five_bits(blocks[:, 4:])
    return _above(codes, float16(blocks[:, :4]), rows, columns, Q5_1)


def q8_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 codes of 8 bits."""
    return scaled(int8(blocks[:, 2:]), float16(blocks[:, :2]), rows, columns, Q8_0)


def q1_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 128 bits in their order: 1 is d, and 0 is -d."""
    codes = fields(blocks[:, 2:], 1).transpose(1, 2).to(torch.int8) * 2 - 1
    return scaled(codes, float16(blocks[:, :2]), rows, columns)


def q2_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 64 codes of 2 bits in their order, which are 1 too high."""
    codes = fields(blocks[:, 2:], 2).transpose(1, 2).to(torch.int8) - 1
    return scaled(codes, float16(blocks[:, :2]), rows, columns)


def tq1_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 240 codes in 48 bytes, 16 codes in 4 bytes, d float16.

    A code is a digit of base 3, less 1. Five of them lie in a byte, as a fraction of 256: a digit is what
    multiplying by 3 carries out of the byte, and what stays in the byte holds the digits after it.
    """
    powers = torch.tensor(POWERS, dtype=torch.uint8, device=blocks.device)[:, None]
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    left = torch.cat([(part[:, None] * powers[:digits]).flatten(1) for part, digits in parts], dim=1)
    codes = ((left.short() * 3) >> 8).to(torch.int8) - 1
    return scaled(codes, float16(blocks[:, 52:]), rows, columns)


def tq2_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack two times 32 bytes with 128 codes of 2 bits, which are 1 too high; d float16."""
    codes = fields(blocks[:, :64].reshape(-1, 2, 32), 2).to(torch.int8) - 1
    return scaled(codes, float16(blocks[:, 64:]), rows, columns)


def iq4_nl(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 numbers of 4 bits, which name codes of a book."""
    codes = codebook_values("iq4", fields(blocks[:, 2:], 4))
    return scaled(codes, float16(blocks[:, :2]), rows, columns, IQ4_NL)


def mxfp4(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack an exponent, 32 numbers of 4 bits; the codes that these name are twice their values.

    The scale is 2 ** (exponent - 128), which bfloat16 holds.
    """
    exponents = blocks[:, :1].int() - 128
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    codes = codebook_values("mxfp4", fields(blocks[:, 1:], 4))
    return scaled(codes, scales.bfloat16(), rows, columns, MXFP4)


def nvfp4(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 4 scales, 8 bytes for each with 16 numbers as in MXFP4.

    A scale has 4 bits of exponent and 3 of fraction, as float8_e4m3fn without its sign. 0x7f is 0.
    """
    stored, eighth = blocks[:, :4].int(), 2.0**-3
    exponent, fraction = (stored >> 3) & 15, (stored & 7) * eighth
    values = torch.where(exponent == 0, fraction * 2.0**-6, torch.ldexp(1 + fraction, exponent - 7))
    scales = torch.where(stored == 0x7F, 0.0, values * 0.5)  # the codes are twice their values
    codes = codebook_values("mxfp4", fields(blocks[:, 4:].reshape(-1, 4, 8), 4))
    return scaled(codes, scales, rows, columns)


def _five_bits(packed: Tensor) -> Tensor:
    """Return numbers [B, 32] of 5 bits: 4 bytes hold the highest bits in their order, 16 the others."""
    high = fields(packed[:, :4], 1).transpose(1, 2).flatten(1)
    return int8(fields(packed[:, 4:], 4).flatten(1) | (high << 4))


def scaled(codes: Tensor, scales: Tensor, rows: int, columns: int, coding: Coding | None = None) -> Codes:
    """Return a weight of codes [B, ...] and scales [B, ...] of equal shares of them."""
    group = codes[0].numel() // scales.shape[1]
    return Codes(codes.to(torch.int8).reshape(rows, columns), scales.reshape(rows, -1), group, coding)


def _above(codes: Tensor, numbers: Tensor, rows: int, columns: int, coding: Coding) -> Codes:
    """Return a weight whose groups of codes have a scale and a minimum, [B, 2]."""
    scales, minimums = (each.reshape(rows, -1).contiguous() for each in numbers.unbind(1))
    return Codes(codes.reshape(rows, columns), scales, codes[0].numel(), coding, offsets=-minimums)
