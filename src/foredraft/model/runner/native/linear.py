"""Products with weights that are packed for the C kernels: blocks of 32 outputs, read in order."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.compilation import declare, library
from foredraft.kernels.huge_pages import Arena
from foredraft.model.quantisation.activations import ActivationFormat
from foredraft.workers import own_threads

__all__ = [
    "BLOCK",
    "CCoding",
    "CLinear",
    "NativeLinear",
    "fits",
    "kernels",
    "linear_struct",
    "multiply",
    "pack_native",
    "padded_bias",
    "pointer",
    "suffix",
    "weight_rows",
]

BLOCK = 32  # outputs of a block, as in kernels.c
WORD = {torch.float32: 1, torch.bfloat16: 2}  # values per 32-bit word
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # in the names of C functions


class CCoding(ctypes.Structure):
    """`Coding` in kernels.c."""

    _fields_ = tuple(
        (name, c_int64)
        for name in ("bits", "scale", "columns", "lowest", "zeros", "offsets", "float8", "book")
    )


class CLinear(ctypes.Structure):
    """`Linear` in kernels.c."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("coding", CCoding),
        ("inputs", c_int64),
        ("order", c_void_p),
        ("scale", c_float),
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

    @property
    def dtype(self) -> torch.dtype:
        """Of x and the weight."""
        return self.weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., K] times the weight, plus the bias: [..., M]."""
        assert x.dtype == self.weight.dtype
        return multiply(self.as_struct(), x)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [..., K] of the weight, of ids [...]."""
        return weight_rows(self.as_struct(), self.dtype, ids)

    def as_struct(self) -> CLinear:
        """Return the C struct of this product, which is valid as long as this object lives."""
        return linear_struct(self.weight, self.bias, self.shape, CCoding(), self.inputs)

    def dense(self) -> Tensor:
        """Return the weight as an ordinary tensor [M, K], a copy."""
        rows, columns = self.shape
        word = WORD[self.weight.dtype]
        blocks = self.weight.view(-1, columns // word, BLOCK, word).transpose(1, 2)
        return blocks.reshape(-1, columns)[:rows].contiguous()


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
    _pack()(weight.data_ptr(), rows, words, packed.data_ptr(), own_threads())
    return NativeLinear(packed, (rows, columns), padded_bias(bias))


def padded_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias [M] as the kernels read it: in float32, padded to whole blocks."""
    return None if bias is None else torch.nn.functional.pad(bias.float(), (0, -len(bias) % BLOCK))


def suffix(dtype: torch.dtype) -> str:
    """Return the suffix of the C functions for this dtype."""
    return f"_{NAMES[dtype]}"


def multiply(linear: CLinear, x: Tensor) -> Tensor:
    """Return x [..., K] times the weight of a struct, plus the bias: [..., M]."""
    # the kernel rounds and orders inputs in place
    changed = linear.inputs or linear.order
    x = x.clone(memory_format=torch.contiguous_format) if changed else x.contiguous()
    assert x.shape[-1] == linear.k
    out = x.new_empty(*x.shape[:-1], linear.n)
    rows = x.numel() // linear.k
    _product(x.dtype)(ctypes.addressof(linear), x.data_ptr(), rows, out.data_ptr(), own_threads())
    return out


def weight_rows(linear: CLinear, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Return the rows [..., K] of the weight of a struct, of ids [...]."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, linear.k, dtype=dtype)
    _rows(dtype)(ctypes.addressof(linear), ids.data_ptr(), ids.numel(), out.data_ptr())
    return out


def pointer(x: Tensor | None) -> int | None:
    """Return where a tensor is, for C; None is a null pointer."""
    return None if x is None else x.data_ptr()


def linear_struct(
    weight: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    coding: CCoding,
    inputs: ActivationFormat | None,
    order: Tensor | None = None,
) -> CLinear:
    """Return a C struct, which is valid as long as the tensors live."""
    rounding = 0 if inputs is None else inputs
    return CLinear(weight.data_ptr(), pointer(bias), *shape, coding, rounding, pointer(order))


@functools.cache
def _pack() -> Any:
    return declare(kernels().foredraft_pack, (c_void_p, c_int64, c_int64, c_void_p, c_int))


@functools.cache
def _rows(dtype: torch.dtype) -> Any:
    rows = getattr(kernels(), f"foredraft_rows{suffix(dtype)}")
    return declare(rows, (c_void_p, c_void_p, c_int64, c_void_p))


@functools.cache
def _product(dtype: torch.dtype) -> Any:
    product = getattr(kernels(), f"foredraft_product{suffix(dtype)}")
    return declare(product, (c_void_p, c_void_p, c_int64, c_void_p, c_int))


def kernels() -> ctypes.CDLL:
    """Return the library of the kernels, which is there where weights are packed."""
    found = library()
    assert found is not None, "weights are packed only where the kernels are available"
    return found
