"""Products with coded weights, packed for the C kernels (kernels/coding.inc).

A product rounds no weight: codes are exact in the dtype, their products are summed over the columns that
share a scale, and the sum is scaled in float32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from foredraft.kernels.compilation import declare
from foredraft.kernels.huge_pages import Arena
from foredraft.model.layers import Product, RowSource
from foredraft.model.quantisation.activations import ActivationFormat
from foredraft.model.quantisation.codes import CODEBOOKS, GROUP, SUPER, Codes, Coding, codebook_values
from foredraft.model.quantisation.quantise import quantise
from foredraft.model.runner.native.linear import (
    BLOCK,
    CCoding,
    CLinear,
    NativeLinear,
    kernels,
    linear_struct,
    multiply,
    padded_bias,
    pointer,
    weight_rows,
)
from foredraft.workers import own_threads

__all__ = [
    "NativeCodes",
    "NativeProduct",
    "code_native",
    "coded_bytes",
    "is_native",
    "pack_codes",
    "pack_pieces",
]

# numbers of the dtypes of scales in kernels.c; int8 are nested ones
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.int8: 3}
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits of a code -> those of each plane


class CCodes(ctypes.Structure):
    """`Codes` in kernels/coding.inc."""

    _fields_ = tuple((name, c_void_p) for name in ("codes", "scales", "offsets", "steps", "offset_steps"))


@dataclass(frozen=True, slots=True)
class NativeCodes:
    """The product of x [N, K] with a coded weight [M, K], plus its bias.

    Attributes:
        weight: Scales and codes as the kernels read them, bytes.
        shape: (M, K).
        coding: Of the codes.
        scale: The dtype of the scales.
        dtype: Of x, and of the weight that `dense` returns.
        bias: [M, padded to whole blocks] float32, or None.
        inputs: The numbers that x is rounded to first; None leaves it as it is.
        order: [K] int32, the columns of x that are multiplied with the packed ones; None: they are in order.
    """

    weight: Tensor
    shape: tuple[int, int]
    coding: Coding
    scale: torch.dtype
    dtype: torch.dtype
    bias: Tensor | None
    inputs: ActivationFormat | None = None
    order: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the weight, plus the bias: [..., M]."""
        assert x.dtype == self.dtype
        return multiply(self.as_struct(), x)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [..., K] of the weight, of ids [...], rounded to the dtype."""
        return weight_rows(self.as_struct(), self.dtype, ids)

    def as_struct(self) -> CLinear:
        """Return the C struct of this product, which is valid as long as this object lives."""
        coding = _coding_struct(self.coding, self.scale)
        return linear_struct(self.weight, self.bias, self.shape, coding, self.inputs, self.order)

    def codes(self) -> Codes:
        """Return the weight as codes, a copy."""
        (rows, columns), coding = self.shape, self.coding
        steps_bytes, group_bytes = _step_bytes(coding), _group_bytes(coding, self.scale)
        blocks = -(-rows // BLOCK)
        supers = self.weight.view(blocks, columns // (SUPER if coding.nested else GROUP), -1)
        steps = supers[..., :steps_bytes].contiguous().view(torch.float16)
        groups = supers[..., steps_bytes:].reshape(blocks, columns // GROUP, group_bytes)
        planes = PLANES[coding.bits]
        scale_bytes = BLOCK * GROUP // coding.group * self.scale.itemsize
        sizes = (scale_bytes, scale_bytes * coding.offsets, BLOCK * coding.zeros)
        scales, offsets, zeros, *parts = torch.split_with_sizes(
            groups, [*sizes, *(GROUP * BLOCK * bits // 8 for bits in planes)], -1
        )
        if coding.bits == 8:
            halves = parts[0].contiguous().view(torch.int8)
        else:
            halves, below = _numbers(parts[0], planes[0]), planes[0]
            if len(planes) > 1:
                halves = halves | _numbers(parts[1], planes[1]) << below
            if coding.codebook is not None:
                halves = codebook_values(coding.codebook, halves)
            else:
                halves = halves + coding.lowest
        # [blocks, groups, words, halves, outputs, columns] to rows of halves and outputs
        words = (
            halves.to(torch.int8)
            .view(blocks, columns // GROUP, GROUP // 2, 2, BLOCK // 2, 2)
            .permute(0, 3, 4, 1, 2, 5)
        )
        if coding.zeros:  # relative to the middle, which was subtracted
            shifts = (zeros.to(torch.int8) - 8).view(blocks, -1, 2, BLOCK // 2)
            words = words + shifts.permute(0, 2, 3, 1)[..., None, None]
        found = words.reshape(-1, columns)[:rows]
        return Codes(
            found.view(torch.float8_e4m3fn) if coding.float8 else found,
            _by_row(scales.contiguous().view(self.scale), rows),
            coding.group,
            coding,
            _by_row(steps[..., :BLOCK], rows) if coding.nested else None,
            _by_row(offsets.contiguous().view(self.scale), rows) if coding.offsets else None,
            _by_row(steps[..., BLOCK:], rows) if coding.offsets and coding.nested else None,
            order=self.order,
        )

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor [M, K], rounded to the dtype."""
        return self.codes().expand(self.dtype)


NativeProduct: TypeAlias = NativeLinear | NativeCodes  # a linear layer that the kernels run


def is_native(product: Product | RowSource) -> TypeGuard[NativeProduct]:
    """Return whether a linear layer, or the rows of an embedding, is packed for the kernels."""
    return isinstance(product, NativeLinear | NativeCodes)


def _numbers(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers [..., halves, 32] of 16-bit lanes [..., bytes], the lowest bits first."""
    lanes = packed.contiguous().view(torch.int16).to(torch.int32).view(*packed.shape[:-1], -1, BLOCK)
    shifted = [lanes >> (bits * t) & 2**bits - 1 for t in range(16 // bits)]
    return torch.stack(shifted, -2).flatten(-3, -2)


def _by_row(packed: Tensor, rows: int) -> Tensor:
    """Return [rows, groups * numbers] of [blocks, groups, numbers * 32]."""
    blocks, groups, _ = packed.shape
    return packed.reshape(blocks, groups, -1, BLOCK).permute(0, 3, 1, 2).reshape(blocks * BLOCK, -1)[:rows]


def coded_bytes(rows: int, columns: int, coding: Coding, scale: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of a coded weight [M, K]; `scale` is a dtype that the coding leaves open."""
    scale = torch.int8 if coding.nested else torch.float32 if coding.wide else scale
    steps = columns // SUPER * _step_bytes(coding)
    return -(-rows // BLOCK) * (columns // GROUP * _group_bytes(coding, scale) + steps)


def _group_bytes(coding: Coding, scale: torch.dtype) -> int:
    """Return the bytes of a group of a block, as `group_bytes` in kernels/coding.inc does."""
    scales = scale.itemsize * (GROUP // coding.group) * (1 + coding.offsets)
    return BLOCK * (scales + coding.zeros + GROUP * coding.bits // 8)


def _step_bytes(coding: Coding) -> int:
    return BLOCK * torch.float16.itemsize * (1 + coding.offsets) if coding.nested else 0


def pack_codes(
    codes: Codes, dtype: torch.dtype, bias: Tensor | None, arena: Arena | None = None
) -> NativeCodes:
    """Return the product with a packed copy of codes; otherwise as `pack_pieces`."""
    return pack_pieces(codes.shape, [codes], dtype, bias, arena)


def pack_pieces(
    shape: tuple[int, int],
    pieces: Iterable[Codes],
    dtype: torch.dtype,
    bias: Tensor | None,
    arena: Arena | None = None,
) -> NativeCodes:
    """Return the product with a packed copy of a weight; one of its pieces is in memory at a time.

    Args:
        shape: (M, K) of the weight.
        pieces: Its rows, from the first on, with a coding and the groups that it has. All have the same
            coding, dtype of scales, and order. All but the last have whole blocks of rows.
        dtype: Of x.
        bias: [M], or None.
        arena: Holds the packed weight; None allocates it by itself.
    """
    rows, columns = shape
    product: NativeCodes | None = None
    at = 0  # the next piece's first row
    for piece in pieces:
        coding, scale = piece.coding, piece.scales.dtype
        assert coding is not None and piece.group == coding.group and coding.holds(columns)
        if product is None:
            size = (coded_bytes(rows, columns, coding, scale),)
            packed = torch.empty(size, dtype=torch.uint8) if arena is None else arena.empty(size, torch.uint8)
            product = NativeCodes(packed, shape, coding, scale, dtype, padded_bias(bias), order=piece.order)
        assert (coding, scale) == (product.coding, product.scale) and at % BLOCK == 0
        _pack(piece, coding, product.weight[at // BLOCK * coded_bytes(BLOCK, columns, coding, scale) :])
        at += len(piece.codes)
    assert product is not None and at == rows
    return product


def _pack(piece: Codes, coding: Coding, packed: Tensor) -> None:
    """Write a piece to the beginning of `packed`."""
    numbers = piece.codes.view(torch.int8) if coding.float8 else piece.codes.to(torch.int8)
    parts = numbers, piece.scales, piece.offsets, piece.steps, piece.offset_steps
    kept = [None if part is None else part.contiguous() for part in parts]
    weight, described = CCodes(*map(pointer, kept)), _coding_struct(coding, piece.scales.dtype)
    _pack_kernel()(
        ctypes.addressof(weight), *piece.shape, ctypes.addressof(described), packed.data_ptr(),
        own_threads(),
    )  # fmt: skip


def code_native(product: Product, bits: int, arena: Arena) -> Product:
    """Return a native product with its weight coded; itself where it has no more bits, or no whole groups."""
    assert is_native(product)
    rows, columns = product.shape
    if not Coding(bits).holds(columns) or (isinstance(product, NativeCodes) and product.coding.bits <= bits):
        return product
    weight, bias = product.dense(), None if product.bias is None else product.bias[:rows]
    return replace(pack_codes(quantise(weight, bits), weight.dtype, bias, arena), inputs=product.inputs)


def _coding_struct(coding: Coding, scale: torch.dtype) -> CCoding:
    book = 0 if coding.codebook is None else 1 + [*CODEBOOKS].index(coding.codebook)
    return CCoding(
        coding.bits,
        SCALES[scale],
        coding.group,
        coding.lowest,
        coding.zeros,
        coding.offsets,
        coding.float8,
        book,
    )


@functools.cache
def _pack_kernel() -> Any:
    return declare(kernels().foredraft_pack_codes, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int))
