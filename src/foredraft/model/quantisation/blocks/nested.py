"""The K-quants and IQ4_XS: integer scales in steps that 256 values share.

Each function takes blocks [B, bytes] uint8 and the (rows, columns) of the weight that they make.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from foredraft.model.quantisation.blocks.bits import fields, float16, int8
from foredraft.model.quantisation.codes import Codes, Coding, codebook_values

__all__ = [
    "IQ4_XS",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "iq4_xs",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
]

Q2_K = Coding(2, group=16, unsigned=True, nested=True, offsets=True)
Q3_K = Coding(3, group=16, nested=True)
Q4_K = Coding(4, unsigned=True, nested=True, offsets=True)
Q5_K = Coding(5, unsigned=True, nested=True, offsets=True)
Q6_K = Coding(6, group=16, nested=True)
IQ4_XS = Coding(4, nested=True, codebook="iq4")


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
    """Unpack two times 64 bytes of low halves, two times 32 bytes of 2 high bits, 16 scales, d.

    Codes are 32 too high.
    """
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).flatten(1)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (high << 4)).to(torch.int8) - 32
    return _nested(codes, int8(blocks[:, 192:208]), rows, columns, Q6_K, blocks[:, 208:])


def iq4_xs(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d, the high 2 bits of 8 scales in 2 bytes, their low 4 bits in 4 bytes, 8 times 16 bytes.

    The numbers of these name codes of a book. Scales are 32 too high.
    """
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
    coding: Coding,
    step: Tensor,
    minimums: Tensor | None = None,
    minimum_step: Tensor | None = None,
) -> Codes:
    """Return a weight of codes [B, ...] with scales and minimums [B, 256 / group], in steps of two bytes."""
    found = Codes(
        int8(codes.reshape(rows, columns)),
        int8(scales.reshape(rows, -1)),
        coding.group,
        coding,
        steps=float16(step).view(rows, -1),
    )
    if minimums is None or minimum_step is None:
        return found
    offsets, offset_steps = int8(minimums.reshape(rows, -1)), float16(minimum_step).view(rows, -1)
    return replace(found, offsets=offsets, offset_steps=offset_steps)
