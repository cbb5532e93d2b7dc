"""A product on a weight that is laid out for the kernels: blocks of 32 outputs, read once from end to end."""

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

__all__ = ["NativeLinear", "arrange", "fits", "suffix"]

BLOCK = 32
WORD = {torch.float32: 1, torch.bfloat16: 2}  # values to a word of 32 bits
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CLinear(ctypes.Structure):
    """`Linear` of kernels.c."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """The product on an arranged weight."""

    weight: Tensor  # [ceil(M / 32), K, 32] of the weight's dtype, opaque
    shape: tuple[int, int]  # (M, K)
    bias: Tensor | None  # [M, padded to whole blocks] float32

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self.weight.dtype and x.shape[-1] == self.shape[1]
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        rows = x.numel() // self.shape[1]
        linear = self.view()
        _product(x.dtype)(
            ctypes.addressof(linear), x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads()
        )
        return out

    def view(self) -> CLinear:
        """For the kernels; valid while this product lives."""
        return CLinear(
            self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr(), *self.shape
        )

    def dense(self) -> Tensor:
        rows, columns = self.shape
        word = WORD[self.weight.dtype]
        blocks = self.weight.view(-1, columns // word, BLOCK, word).transpose(1, 2)
        return blocks.reshape(-1, columns)[:rows].contiguous()


def fits(dtype: torch.dtype, columns: int) -> bool:
    """Whether weights of so many columns can be arranged."""
    return dtype in WORD and columns % WORD[dtype] == 0


def arrange(weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> NativeLinear:
    """The product on a copy of this weight [M, K], which lies in the arena, where one is given."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    missing = -rows % BLOCK
    shape = ((rows + missing) // BLOCK, columns, BLOCK)
    packed = weight.new_empty(shape) if arena is None else arena.empty(shape, weight.dtype)
    words = columns // WORD[weight.dtype]
    _pack()(weight.data_ptr(), rows, words, packed.data_ptr(), torch.get_num_threads())
    offset = None if bias is None else torch.nn.functional.pad(bias.float(), (0, missing))
    return NativeLinear(packed, (rows, columns), offset)


def suffix(dtype: torch.dtype) -> str:
    return f"_{NAMES[dtype]}"


@functools.cache
def _pack() -> Any:
    return declare(_library().foredraft_pack, (c_void_p, c_int64, c_int64, c_void_p, c_int))


@functools.cache
def _product(dtype: torch.dtype) -> Any:
    product = getattr(_library(), f"foredraft_product{suffix(dtype)}")
    return declare(product, (c_void_p, c_void_p, c_int64, c_void_p, c_int))


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "no weight is arranged where there are no kernels"
    return found
