"""Products with weights that are packed for the C kernels: blocks of 32 outputs, read in order.

A weight is stored in its dtype, or as codes of 4 or 8 bits (kernels/codes.inc). A product with codes rounds
no weight: codes are exact in the dtype, their products are summed over a group, and the sum is scaled in
float32.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.compilation import declare, library
from foredraft.kernels.huge_pages import Arena
from foredraft.model.layers import Product
from foredraft.model.quantisation.activations import ActivationFormat
from foredraft.model.quantisation.codes import GROUP, Codes, Coding
from foredraft.model.quantisation.quantise import quantise

__all__ = [
    "NativeCodes",
    "NativeLinear",
    "code_native",
    "coded_bytes",
    "fits",
    "pack_codes",
    "pack_native",
    "suffix",
]

BLOCK = 32  # outputs of a block, as in kernels.c
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # numbers of the dtypes in kernels.c
WORD = {torch.float32: 1, torch.bfloat16: 2}  # values per 32-bit word
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # in the names of C functions


class CCoding(ctypes.Structure):
    """`Coding` in kernels.c."""

    _fields_ = (("bits", c_int64), ("scale", c_int64), ("zeros", c_int64))


class CLinear(ctypes.Structure):
    """`Linear` in kernels.c."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("coding", CCoding),
        ("inputs", c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """The product of x [N, K] with a packed weight [M, K], plus its bias.

    Attributes:
        weight: The packed weight, [ceil(M / 32), K, 32] of the weight's dtype; only the kernels read it.
        shape: (M, K).
        bias: [M, padded to whole blocks] float32, or None.
        inputs: The numbers that x is rounded to first; None leaves it as it is.
    """

    weight: Tensor
    shape: tuple[int, int]
    bias: Tensor | None
    inputs: ActivationFormat | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the weight, plus the bias: [..., M]."""
        assert x.dtype == self.weight.dtype
        return _call(self.as_struct(), x)

    def as_struct(self) -> CLinear:
        """Return the C struct of this product, which is valid as long as this object lives."""
        return _linear_struct(self, CCoding(0, 0, 0))

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor [M, K], a copy."""
        rows, columns = self.shape
        word = WORD[self.weight.dtype]
        blocks = self.weight.view(-1, columns // word, BLOCK, word).transpose(1, 2)
        return blocks.reshape(-1, columns)[:rows].contiguous()


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
    """

    weight: Tensor
    shape: tuple[int, int]
    coding: Coding
    scale: torch.dtype
    dtype: torch.dtype
    bias: Tensor | None
    inputs: ActivationFormat | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the weight, plus the bias: [..., M]."""
        assert x.dtype == self.dtype
        return _call(self.as_struct(), x)

    def as_struct(self) -> CLinear:
        """Return the C struct of this product, which is valid as long as this object lives."""
        return _linear_struct(self, _coding_struct(self.coding, self.scale))

    def codes(self) -> Codes:
        """Return the weight as codes, a copy."""
        rows, columns = self.shape
        groups = self.weight.view(-1, columns // GROUP, _group_bytes(self.coding, self.scale))
        to_zeros = BLOCK * self.scale.itemsize
        to_codes = to_zeros + BLOCK * self.coding.zeros
        scales = groups[..., :to_zeros].contiguous().view(self.scale)  # [blocks, groups, 32]
        packed = groups[..., to_codes:].contiguous()
        if self.coding.bits == 4:  # [j, 16-bit lanes], of which number t is in bits 4 t to 4 t + 3
            lanes = packed.view(torch.int16).to(torch.int32).view(*packed.shape[:2], -1, BLOCK)
            halves = torch.stack([(lanes >> (4 * t) & 15) - 8 for t in range(4)], 3).flatten(2, 3)
        else:
            halves = packed.view(torch.int8).view(*packed.shape[:2], -1, BLOCK)
        # [blocks, groups, words, halves, outputs, columns] to rows of halves and outputs
        words = (
            halves.to(torch.int8)
            .view(*packed.shape[:2], GROUP // 2, 2, BLOCK // 2, 2)
            .permute(0, 3, 4, 1, 2, 5)
        )
        if self.coding.zeros:  # relative to the middle, which was subtracted
            zeros = groups[..., to_zeros:to_codes].to(torch.int8)
            shifts = (zeros - 8).view(*packed.shape[:2], 2, BLOCK // 2)
            words = words + shifts.permute(0, 2, 3, 1)[..., None, None]
        by_row = scales.transpose(1, 2).reshape(-1, columns // GROUP)
        return Codes(words.reshape(-1, columns)[:rows], by_row[:rows], GROUP, self.coding)

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor [M, K], rounded to the dtype."""
        return self.codes().expand(self.dtype)


def coded_bytes(rows: int, columns: int, coding: Coding, scale: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of a coded weight [M, K]."""
    return -(-rows // BLOCK) * (columns // GROUP) * _group_bytes(coding, scale)


def _group_bytes(coding: Coding, scale: torch.dtype) -> int:
    return BLOCK * (scale.itemsize + coding.zeros + GROUP * coding.bits // 8)


def pack_codes(
    codes: Codes, dtype: torch.dtype, bias: Tensor | None, arena: Arena | None = None
) -> NativeCodes:
    """Return the product with a packed copy of codes.

    Args:
        codes: With a coding, and of groups of `GROUP` columns.
        dtype: Of x.
        bias: [M], or None.
        arena: Holds the packed weight; None allocates it by itself.
    """
    (rows, columns), coding, scale = codes.shape, codes.coding, codes.scales.dtype
    assert coding is not None and codes.group == GROUP and columns % GROUP == 0
    shape = (coded_bytes(rows, columns, coding, scale),)
    packed = torch.empty(shape, dtype=torch.uint8) if arena is None else arena.empty(shape, torch.uint8)
    values, scales = codes.codes.to(torch.int8).contiguous(), codes.scales.contiguous()
    described = _coding_struct(coding, scale)
    _pack_codes()(
        values.data_ptr(), scales.data_ptr(), rows, columns, ctypes.addressof(described), packed.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -rows % BLOCK))
    return NativeCodes(packed, (rows, columns), coding, scale, dtype, padded)


def code_native(product: Product, bits: int, arena: Arena) -> Product:
    """Return a native product with its weight coded; itself where it has no more bits, or no whole groups."""
    assert isinstance(product, NativeLinear | NativeCodes)
    rows, columns = product.shape
    if columns % GROUP or (isinstance(product, NativeCodes) and product.coding.bits <= bits):
        return product
    weight, bias = product.dense(), None if product.bias is None else product.bias[:rows]
    return pack_codes(quantise(weight, bits), weight.dtype, bias, arena)


def fits(dtype: torch.dtype, columns: int) -> bool:
    """Return whether weights [M, columns] of this dtype can be packed for the kernels."""
    return dtype in WORD and columns % WORD[dtype] == 0


def pack_native(weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> NativeLinear:
    """Return the product with a packed copy of a weight.

    Args:
        weight: [M, K] of a dtype and a width that `fits` accepts.
        bias: [M], or None.
        arena: Holds the packed weight; None allocates it by itself.
    """
    weight = weight.contiguous()
    rows, columns = weight.shape
    missing = -rows % BLOCK
    shape = ((rows + missing) // BLOCK, columns, BLOCK)
    packed = weight.new_empty(shape) if arena is None else arena.empty(shape, weight.dtype)
    words = columns // WORD[weight.dtype]
    _pack()(weight.data_ptr(), rows, words, packed.data_ptr(), torch.get_num_threads())
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, missing))
    return NativeLinear(packed, (rows, columns), padded)


def suffix(dtype: torch.dtype) -> str:
    """Return the suffix of the C functions for this dtype."""
    return f"_{NAMES[dtype]}"


def _call(linear: CLinear, x: Tensor) -> Tensor:
    x = x.clone() if linear.inputs else x.contiguous()  # the kernel rounds it in place
    assert x.shape[-1] == linear.k
    out = x.new_empty(*x.shape[:-1], linear.n)
    rows = x.numel() // linear.k
    _product(x.dtype)(ctypes.addressof(linear), x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads())
    return out


def _linear_struct(linear: NativeLinear | NativeCodes, coding: CCoding) -> CLinear:
    inputs = 0 if linear.inputs is None else linear.inputs
    return CLinear(linear.weight.data_ptr(), _address(linear.bias), *linear.shape, coding, inputs)


def _coding_struct(coding: Coding, scale: torch.dtype) -> CCoding:
    return CCoding(coding.bits, SCALES[scale], coding.zeros)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


@functools.cache
def _pack_codes() -> Any:
    arguments = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int)
    return declare(_library().foredraft_pack_codes, arguments)


@functools.cache
def _pack() -> Any:
    return declare(_library().foredraft_pack, (c_void_p, c_int64, c_int64, c_void_p, c_int))


@functools.cache
def _product(dtype: torch.dtype) -> Any:
    product = getattr(_library(), f"foredraft_product{suffix(dtype)}")
    return declare(product, (c_void_p, c_void_p, c_int64, c_void_p, c_int))


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "weights are packed only where the kernels are available"
    return found
