"""The block formats: scales beside the codes, scales in steps that 256 values share, and points of a grid
(IQ1 to 3).

Each function takes blocks [B, bytes] uint8 and the (rows, columns) of the weight that they make. Codes lie in
halves, quarters or bits of bytes: those in the lowest bits come first (`fields`).

Each function takes blocks [B, bytes] uint8 and the (rows, columns) of the weight that they make. A group of
codes has a scale in float32: an odd multiple of a fraction of d. The grids are in grids.safetensors, which
recipes/grids.py made.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.model.quantisation.codes import CodeFormat, Codes, codebook_values


def fields(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of so many bits that bytes hold, the lowest bits first.

    Examples:
        >>> fields(torch.tensor([0x21, 0x43], dtype=torch.uint8), 4).tolist()
        [[1, 3], [2, 4]]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    found: Tensor = (packed[..., None, :] >> shifts) & (2**bits - 1)
    return found


def float16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2 N] as numbers [B, N]."""
    return stored.contiguous().view(torch.float16)


def int8(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.int8)


def uint16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2 N] as numbers [B, N] of int32."""
    low, high = stored.view(*stored.shape[:-1], -1, 2).int().unbind(-1)
    return low | (high << 8)


def uint32(stored: Tensor) -> Tensor:
    """Return four bytes each [B, 4 N] as numbers [B, N] of int64."""
    low, high = uint16(stored).long().view(*stored.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 16)


Q4_0, Q4_1 = CodeFormat(4), CodeFormat(4, unsigned=True, offsets=True)
Q5_0, Q5_1 = CodeFormat(5), CodeFormat(5, unsigned=True, offsets=True)
Q8_0 = CodeFormat(8)
IQ4_NL, MXFP4 = CodeFormat(4, codebook="iq4"), CodeFormat(4, codebook="mxfp4")
POWERS = (1, 3, 9, 27, 81)  # of the digits of TQ1_0


def q4_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 codes of 4 bits, which are 8 too high."""
    codes = fields(blocks[:, 2:], 4).to(torch.int8) - 8
    return scaled(codes, float16(blocks[:, :2]), rows, columns, Q4_0)


def q4_1(blocks: Tensor, rows: int, columns: int) -> Codes:
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
    """Unpack an exponent, 32 numbers of 4 bits, for codes twice their values; the scale fits bfloat16."""
    exponents = blocks[:, :1].int() - 128
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    codes = codebook_values("mxfp4", fields(blocks[:, 1:], 4))
    return scaled(codes, scales.bfloat16(), rows, columns, MXFP4)


def nvfp4(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 4 scales, float8_e4m3fn without a sign and with 0x7f for 0, 8 bytes for each as in MXFP4."""
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


def scaled(codes: Tensor, scales: Tensor, rows: int, columns: int, form: CodeFormat | None = None) -> Codes:
    """Return a weight of codes [B, ...] and scales [B, ...] of equal shares of them."""
    group = codes[0].numel() // scales.shape[1]
    return Codes(codes.to(torch.int8).reshape(rows, columns), scales.reshape(rows, -1), group, form)


def _above(codes: Tensor, numbers: Tensor, rows: int, columns: int, code_format: CodeFormat) -> Codes:
    """Return a weight whose groups of codes have a scale and a minimum, [B, 2]."""
    scales, minimums = (each.reshape(rows, -1).contiguous() for each in numbers.unbind(1))
    return Codes(codes.reshape(rows, columns), scales, codes[0].numel(), code_format, offsets=-minimums)


Q2_K = CodeFormat(2, group=16, unsigned=True, nested=True, offsets=True)
Q3_K = CodeFormat(3, group=16, nested=True)
Q4_K = CodeFormat(4, unsigned=True, nested=True, offsets=True)
Q5_K = CodeFormat(5, unsigned=True, nested=True, offsets=True)
Q6_K = CodeFormat(6, group=16, nested=True)
IQ4_XS = CodeFormat(4, nested=True, codebook="iq4")


def q2_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 16 bytes with a scale and a minimum of 4 bits each, two times 32 bytes of codes, d and dmin."""
    scales, minimums = fields(blocks[:, :16], 4).unbind(1)
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    return _nested(codes, scales, rows, columns, Q2_K, blocks[:, 80:82], minimums, blocks[:, 82:])


def q3_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 32 bytes of high bits, two times 32 bytes of low bits, 16 scales in 12 bytes, d.

    A code is 4 too high where its high bit is set, and right where it is not. The low 4 bits of the scales
    lie in 8 bytes, their high 2 bits in 4 bytes; scales are 32 too high.
    """
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (fields(blocks[:, :32], 1).flatten(1) << 2)).to(torch.int8) - 4
    scales = fields(blocks[:, 96:104], 4).flatten(1) | (fields(blocks[:, 104:108], 2).flatten(1) << 4)
    return _nested(codes, scales.to(torch.int8) - 32, rows, columns, Q3_K, blocks[:, 108:])


def q4_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d and dmin, 8 scales and 8 minimums in 12 bytes, four times 32 bytes of codes."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    codes = fields(blocks[:, 16:].reshape(-1, 4, 32), 4)
    return _nested(codes, scales, rows, columns, Q4_K, blocks[:, :2], minimums, blocks[:, 2:4])


def q5_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack as `q4_k`, with 32 bytes of fifth bits before the codes."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    low = fields(blocks[:, 48:].reshape(-1, 4, 32), 4).flatten(1)
    codes = low | (fields(blocks[:, 16:48], 1).flatten(1) << 4)
    return _nested(codes, scales, rows, columns, Q5_K, blocks[:, :2], minimums, blocks[:, 2:4])


def q6_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 2 times 64 bytes of low halves, 2 times 32 of 2 high bits, 16 scales, d; codes 32 too high."""
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).flatten(1)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (high << 4)).to(torch.int8) - 32
    return _nested(codes, int8(blocks[:, 192:208]), rows, columns, Q6_K, blocks[:, 208:])


def iq4_xs(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, high 2 bits of 8 scales in 2 bytes, low 4 in 4, which are 32 too high, 8 times 16 bytes."""
    high = fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    codes = codebook_values("iq4", fields(blocks[:, 8:].reshape(-1, 8, 16), 4))
    return _nested(codes, scales, rows, columns, IQ4_XS, blocks[:, :2])


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minimums [B, 8] that share 12 bytes [B, 12].

    The first four of each are the low 6 bits of a byte. The other four have their low 4 bits in the last four
    bytes, and their high 2 bits above those of the first four.
    """
    low, high, mixed = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 6) << 4)], dim=1)
    return scales, torch.cat([high & 63, (mixed >> 4) | ((high >> 6) << 4)], dim=1)


def _nested(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int,
    code_format: CodeFormat,
    step: Tensor,
    minimums: Tensor | None = None,
    minimum_step: Tensor | None = None,
) -> Codes:
    """Return a weight of codes [B, ...] with scales and minimums [B, 256 / group], in steps of two bytes."""
    codes, scales = int8(codes.reshape(rows, columns)), int8(scales.reshape(rows, -1))
    found = Codes(codes, scales, code_format.group, code_format, steps=float16(step).view(rows, -1))
    if minimums is None or minimum_step is None:
        return found
    offsets, offset_steps = int8(minimums.reshape(rows, -1)), float16(minimum_step).view(rows, -1)
    return replace(found, offsets=offsets, offset_steps=offset_steps)


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
    """Unpack d, 32 bytes that name points, and 8 numbers: 4 times 3 bits of a name, a scale, a sign.

    The sign is that of the eighth that all codes of the group have besides.
    """
    more = uint16(blocks[:, 34:])
    names = blocks[:, 2:34].int() | ((_threes(more) & 7) << 8).flatten(1)
    shifts = 1 - 2 * (more >> 15)
    codes = _points("iq1", names).view(-1, 8, 32) * EIGHTHS + shifts[..., None]
    return scaled(codes, _odd(float16(blocks[:, :2]), (more >> 12) & 7) / EIGHTHS, rows, columns)


def iq1_m(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 32 bytes that name points, 4 bits for each: 3 of the name, an eighth's sign; 8 bytes of scales,
    d.

    These 8 bytes are 4 numbers: 4 scales of 3 bits, and 4 bits of d.
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
    return packed[..., None] >> torch.tensor([0, 3, 6, 9], dtype=packed.dtype, device=packed.device)


def _halved(d: Tensor, numbers: Tensor, factor: float) -> Tensor:
    """Return d (1/2 + number) factor, for d in two bytes."""
    return float16(d).float() * (numbers.float() + 0.5) * factor


def _odd(d: Tensor, numbers: Tensor) -> Tensor:
    return d.float() * (numbers.float() * 2 + 1)
