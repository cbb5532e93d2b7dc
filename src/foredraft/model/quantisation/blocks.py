"""The block formats of ggml: what the bytes of a block of a GGUF file's tensor stand for.

Scales stand beside the codes, or in steps that 256 values share; codes may be points of a grid (IQ1 to 3),
which grids.safetensors holds, as recipes/grids.py made it. Codes lie in halves, quarters or bits of bytes:
those in the lowest bits come first (`fields`). In float32 an expanded weight has the bits of
`gguf.quants.dequantize`. In another dtype one without offsets was rounded once; a difference is rounded to
float32 first. Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h,
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c and
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.model.config import ConfigReader
from foredraft.model.quantisation.codes import CodeFormat, Codes, codebook_values
from foredraft.model.quantisation.scheme import (
    METHOD,
    TENSORS,
    Quantisation,
    SchemeRule,
    TensorSpec,
    WeightFormat,
    exactly,
    read_names,
)
from foredraft.model.tensor_names import Naming

FILE = Path(__file__).with_name("grids.safetensors")
POWERS = (1, 3, 9, 27, 81)  # of the digits of TQ1_0
EIGHTHS = 8  # the codes of IQ1 are a point's numbers plus or minus an eighth, times this


class Parts(NamedTuple):
    """What blocks [B, bytes] hold: codes [B, ...], and scales [B, ...] of equal shares of them."""

    codes: Tensor
    scales: Tensor
    steps: Tensor | None = None  # of nested scales, in two bytes
    offsets: Tensor | None = None
    offset_steps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    values: int  # of a block
    size: int  # its bytes
    parts: Callable[[Tensor], Parts]  # of blocks [B, size] uint8
    code_format: CodeFormat | None = None  # how the kernels keep it; None: it is expanded

    def unpack(self, blocks: Tensor, rows: int, columns: int) -> Codes:
        """Return the weight that blocks [B, size] uint8 make."""
        found = self.parts(blocks)
        group, nested = self.values // found.scales[0].numel(), found.steps is not None

        def by_rows(numbers: Tensor | None, *, steps: bool = False) -> Tensor | None:
            if numbers is None:
                return None
            numbers = float16(numbers) if steps else numbers.to(torch.int8) if nested else numbers
            return numbers.reshape(rows, -1)

        scales = by_rows(found.scales)
        assert scales is not None
        return Codes(
            found.codes.to(torch.int8).reshape(rows, columns), scales, group, self.code_format,
            steps=by_rows(found.steps, steps=True), offsets=by_rows(found.offsets),
            offset_steps=by_rows(found.offset_steps, steps=True),
        )  # fmt: skip


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


def behind(decode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Parts]:
    """Return how blocks are unpacked that begin with d, a float16, and hold codes behind it."""
    return lambda blocks: Parts(decode(blocks[:, 2:]), float16(blocks[:, :2]))


def above(decode: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Parts]:
    """Return how blocks are unpacked that begin with d and a minimum, and hold codes behind them."""
    return lambda blocks: Parts(
        decode(blocks[:, 4:]), float16(blocks[:, :2]), offsets=-float16(blocks[:, 2:4])
    )


def tq1_0(blocks: Tensor) -> Parts:
    """Unpack 240 codes in 48 bytes, 16 codes in 4 bytes, d float16.

    A code is a digit of base 3, less 1. Five of them lie in a byte, as a fraction of 256: a digit is what
    multiplying by 3 carries out of the byte, and what stays in the byte holds the digits after it.
    """
    powers = torch.tensor(POWERS, dtype=torch.uint8, device=blocks.device)[:, None]
    parts = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    left = torch.cat([(part[:, None] * powers[:digits]).flatten(1) for part, digits in parts], dim=1)
    codes = ((left.short() * 3) >> 8).to(torch.int8) - 1
    return Parts(codes, float16(blocks[:, 52:]))


def tq2_0(blocks: Tensor) -> Parts:
    """Unpack two times 32 bytes with 128 codes of 2 bits, which are 1 too high; d float16."""
    codes = fields(blocks[:, :64].reshape(-1, 2, 32), 2).to(torch.int8) - 1
    return Parts(codes, float16(blocks[:, 64:]))


def mxfp4(blocks: Tensor) -> Parts:
    """Unpack an exponent, 32 numbers of 4 bits, for codes twice their values; the scale fits bfloat16."""
    exponents = blocks[:, :1].int() - 128
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    codes = codebook_values("mxfp4", fields(blocks[:, 1:], 4))
    return Parts(codes, scales.bfloat16())


def nvfp4(blocks: Tensor) -> Parts:
    """Unpack 4 scales, float8_e4m3fn without a sign and with 0x7f for 0, 8 bytes for each as in MXFP4."""
    stored, eighth = blocks[:, :4].int(), 2.0**-3
    exponent, fraction = (stored >> 3) & 15, (stored & 7) * eighth
    values = torch.where(exponent == 0, fraction * 2.0**-6, torch.ldexp(1 + fraction, exponent - 7))
    scales = torch.where(stored == 0x7F, 0.0, values * 0.5)  # the codes are twice their values
    codes = codebook_values("mxfp4", fields(blocks[:, 4:].reshape(-1, 4, 8), 4))
    return Parts(codes, scales)


def _five_bits(packed: Tensor) -> Tensor:
    """Return numbers [B, 32] of 5 bits: 4 bytes hold the highest bits in their order, 16 the others."""
    high = fields(packed[:, :4], 1).transpose(1, 2).flatten(1)
    return int8(fields(packed[:, 4:], 4).flatten(1) | (high << 4))


def q2_k(blocks: Tensor) -> Parts:
    """Unpack 16 bytes with a scale and a minimum of 4 bits each, two times 32 bytes of codes, d and dmin."""
    scales, minimums = fields(blocks[:, :16], 4).unbind(1)
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2)
    return Parts(codes, scales, blocks[:, 80:82], minimums, blocks[:, 82:])


def q3_k(blocks: Tensor) -> Parts:
    """Unpack 32 bytes of high bits, two times 32 bytes of low bits, 16 scales in 12 bytes, d.

    A code is 4 too high where its high bit is set, and right where it is not. The low 4 bits of the scales
    lie in 8 bytes, their high 2 bits in 4 bytes; scales are 32 too high.
    """
    low = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (fields(blocks[:, :32], 1).flatten(1) << 2)).to(torch.int8) - 4
    scales = fields(blocks[:, 96:104], 4).flatten(1) | (fields(blocks[:, 104:108], 2).flatten(1) << 4)
    return Parts(codes, scales.to(torch.int8) - 32, blocks[:, 108:])


def q4_k(blocks: Tensor) -> Parts:
    """Unpack d and dmin, 8 scales and 8 minimums in 12 bytes, four times 32 bytes of codes."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    codes = fields(blocks[:, 16:].reshape(-1, 4, 32), 4)
    return Parts(codes, scales, blocks[:, :2], minimums, blocks[:, 2:4])


def q5_k(blocks: Tensor) -> Parts:
    """Unpack as `q4_k`, with 32 bytes of fifth bits before the codes."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    low = fields(blocks[:, 48:].reshape(-1, 4, 32), 4).flatten(1)
    codes = low | (fields(blocks[:, 16:48], 1).flatten(1) << 4)
    return Parts(codes, scales, blocks[:, :2], minimums, blocks[:, 2:4])


def q6_k(blocks: Tensor) -> Parts:
    """Unpack 2 times 64 bytes of low halves, 2 times 32 of 2 high bits, 16 scales, d; codes 32 too high."""
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).flatten(1)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).flatten(1)
    codes = (low | (high << 4)).to(torch.int8) - 32
    return Parts(codes, int8(blocks[:, 192:208]), blocks[:, 208:])


def iq4_xs(blocks: Tensor) -> Parts:
    """Unpack d, high 2 bits of 8 scales in 2 bytes, low 4 in 4, which are 32 too high, 8 times 16 bytes."""
    high = fields(blocks[:, 2:4], 2).transpose(1, 2).flatten(1)
    low = fields(blocks[:, 4:8], 4).transpose(1, 2).flatten(1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    codes = codebook_values(BOOK, fields(blocks[:, 8:].reshape(-1, 8, 16), 4))
    return Parts(codes, scales, blocks[:, :2])


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minimums [B, 8] that share 12 bytes [B, 12].

    The first four of each are the low 6 bits of a byte. The other four have their low 4 bits in the last four
    bytes, and their high 2 bits above those of the first four.
    """
    low, high, mixed = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 6) << 4)], dim=1)
    return scales, torch.cat([high & 63, (mixed >> 4) | ((high >> 6) << 4)], dim=1)


def iq2_xxs(blocks: Tensor) -> Parts:
    """Unpack d; for each 32 codes 4 bytes that name points, 4 times 7 bits for signs, 4 bits of scale."""
    stored = blocks[:, 2:].reshape(-1, 8, 8)
    more = uint32(stored[..., 4:])
    codes = _points("iq2_xxs", stored[..., :4]) * _packed_signs(more)
    return Parts(codes, _halved(blocks[:, :2], more.flatten(1) >> 28, 0.25))


def iq2_xs(blocks: Tensor) -> Parts:
    """Unpack d, 32 numbers of 9 bits that name a point and 7 bits for signs, 16 scales of 4 bits."""
    stored = uint16(blocks[:, 2:66])
    codes = _points("iq2_xs", stored & 511) * _signs_of(stored >> 9)
    return Parts(codes, _halved(blocks[:, :2], _in_order(blocks[:, 66:], 4), 0.25))


def iq2_s(blocks: Tensor) -> Parts:
    """Unpack d, 32 bytes that name points, 32 of signs, 2 more bits of each name, 16 scales of 4 bits."""
    names = blocks[:, 2:34].int() | (_in_order(blocks[:, 66:74], 2).int() << 8)
    codes = _points("iq2_s", names) * _signs(blocks[:, 34:66])
    return Parts(codes, _halved(blocks[:, :2], _in_order(blocks[:, 74:], 4), 0.25))


def iq3_xxs(blocks: Tensor) -> Parts:
    """Unpack d, 64 bytes that name points; for each 32 codes 4 times 7 bits for signs, 4 bits of scale."""
    more = uint32(blocks[:, 66:])
    codes = _points("iq3_xxs", blocks[:, 2:66]).view(-1, 8, 4, 8) * _packed_signs(more)
    return Parts(codes, _halved(blocks[:, :2], more >> 28, 0.5))


def iq3_s(blocks: Tensor) -> Parts:
    """Unpack d, 64 bytes that name points, a ninth bit of each name, 32 of signs, 8 scales of 4 bits."""
    names = blocks[:, 2:66].int() | (_in_order(blocks[:, 66:74], 1).int() << 8)
    codes = _points("iq3_s", names).view(-1, 32, 8) * _signs(blocks[:, 74:106])
    return Parts(codes, _odd(float16(blocks[:, :2]), _in_order(blocks[:, 106:], 4)))


def iq1_s(blocks: Tensor) -> Parts:
    """Unpack d, 32 bytes that name points, and 8 numbers: 4 times 3 bits of a name, a scale, a sign.

    The sign is that of the eighth that all codes of the group have besides.
    """
    more = uint16(blocks[:, 34:])
    names = blocks[:, 2:34].int() | ((_threes(more) & 7) << 8).flatten(1)
    shifts = 1 - 2 * (more >> 15)
    codes = _points("iq1", names).view(-1, 8, 32) * EIGHTHS + shifts[..., None]
    return Parts(codes, _odd(float16(blocks[:, :2]), (more >> 12) & 7) / EIGHTHS)


def iq1_m(blocks: Tensor) -> Parts:
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
    return Parts(codes, scales / EIGHTHS)


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


BOOK = "iq4"
BLOCKS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, behind(lambda b: fields(b, 4).to(torch.int8) - 8), CodeFormat(4)),
    "Q4_1": BlockFormat(32, 20, above(lambda b: fields(b, 4)), CodeFormat(4, unsigned=True, offsets=True)),
    "Q5_0": BlockFormat(32, 22, behind(lambda b: _five_bits(b) - 16), CodeFormat(5)),
    "Q5_1": BlockFormat(32, 24, above(lambda b: _five_bits(b)), CodeFormat(5, unsigned=True, offsets=True)),
    "Q8_0": BlockFormat(32, 34, behind(int8), CodeFormat(8)),
    "Q2_K": BlockFormat(256, 84, q2_k, CodeFormat(2, 16, unsigned=True, nested=True, offsets=True)),
    "Q3_K": BlockFormat(256, 110, q3_k, CodeFormat(3, 16, nested=True)),
    "Q4_K": BlockFormat(256, 144, q4_k, CodeFormat(4, unsigned=True, nested=True, offsets=True)),
    "Q5_K": BlockFormat(256, 176, q5_k, CodeFormat(5, unsigned=True, nested=True, offsets=True)),
    "Q6_K": BlockFormat(256, 210, q6_k, CodeFormat(6, 16, nested=True)),
    "IQ4_NL": BlockFormat(
        32, 18, behind(lambda b: codebook_values(BOOK, fields(b, 4))), CodeFormat(4, codebook="iq4")
    ),
    "IQ4_XS": BlockFormat(256, 136, iq4_xs, CodeFormat(4, nested=True, codebook="iq4")),
    "MXFP4": BlockFormat(32, 17, mxfp4, CodeFormat(4, codebook="mxfp4")),
    "NVFP4": BlockFormat(64, 36, nvfp4),
    "IQ1_S": BlockFormat(256, 50, iq1_s),
    "IQ1_M": BlockFormat(256, 56, iq1_m),
    "IQ2_XXS": BlockFormat(256, 66, iq2_xxs),
    "IQ2_XS": BlockFormat(256, 74, iq2_xs),
    "IQ2_S": BlockFormat(256, 82, iq2_s),
    "IQ3_XXS": BlockFormat(256, 98, iq3_xxs),
    "IQ3_S": BlockFormat(256, 110, iq3_s),
    "TQ1_0": BlockFormat(256, 54, tq1_0),
    "TQ2_0": BlockFormat(256, 66, tq2_0),
    "Q1_0": BlockFormat(128, 18, behind(lambda b: _in_order(b, 1).to(torch.int8) * 2 - 1)),
    "Q2_0": BlockFormat(64, 18, behind(lambda b: _in_order(b, 2).to(torch.int8) - 1)),
}


@dataclass(frozen=True, slots=True)
class GGUFFormat(WeightFormat):
    """A block format; `kind` is a key of `BLOCKS`."""

    kind: str
    by_rows: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.kind

    @property
    def code_format(self) -> CodeFormat | None:
        return BLOCKS[self.kind].code_format

    def parts(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(shape, (self.kind,))}

    def codes(self, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Codes:
        """Return the weight of which `tensors` has the bytes of each row, [M, bytes] uint8."""
        block = BLOCKS[self.kind]
        return block.unpack(tensors["weight"].reshape(-1, block.size), *shape)


def read_gguf(read: ConfigReader, _: Naming) -> Quantisation:
    listed = read.take(TENSORS)
    if not isinstance(listed, dict) or not listed.keys() <= BLOCKS.keys():
        raise read.error(TENSORS, f"it must be a JSON object of {', '.join(BLOCKS)}")
    modules = ConfigReader(listed, f"{read.where}, {TENSORS}")
    rules = [SchemeRule(exactly(read_names(modules, kind)), GGUFFormat(kind)) for kind in listed]
    return Quantisation(METHOD, tuple(rules), embedding=True)
