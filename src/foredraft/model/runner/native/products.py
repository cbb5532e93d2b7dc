"""Products with weights that are packed for the C kernels: in blocks of 32 outputs, or as codes
(kernels/code_formats.inc).

A product rounds no weight: codes are exact in the dtype, their products are summed over the columns that
share a scale, and the sum is scaled in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import Tensor

from foredraft.kernels.compilation import kernel, library
from foredraft.kernels.pool import Arena
from foredraft.kernels.vocab import pointer
from foredraft.model.layers import Product, RowSource
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation.codes import CODEBOOKS, GROUP, SUPER, CodeFormat, Codes, quantise
from foredraft.model.quantisation.scheme import ActivationFormat
from foredraft.workers import own_threads

BLOCK, CHUNK = 32, 128  # outputs of a block, and columns of a chunk, as in kernels.c
WORD = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 2}  # values per 32-bit word


class CCodeFormat(ctypes.Structure):
    """`CodeFormat` in kernels.c."""

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
        ("code_format", CCodeFormat),
        ("inputs", c_int64),
        ("order", c_void_p),
        ("scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """The product of x [N, K] with a packed weight [M, K], plus its bias."""

    weight: Tensor  # [ceil(M / 32), K, 32] of the dtype, or the bytes of codes; only the kernels read it
    shape: tuple[int, int]  # (M, K)
    dtype: torch.dtype  # of x, and of the weight that `dense` returns
    bias: Tensor | None  # [M, padded to whole blocks] float32, or None
    inputs: ActivationFormat | None = None  # the numbers that x is rounded to first; None leaves it as it is
    order: Tensor | None = None  # [K] int32, the columns of x in the order of the packed ones

    @property
    def form(self) -> CCodeFormat:
        return CCodeFormat()

    def __call__(self, x: Tensor) -> Tensor:
        (outputs, columns), linear = self.shape, self.as_struct()
        assert x.dtype == self.dtype and x.shape[-1] == columns
        # the kernel rounds and orders inputs in place
        changed = linear.inputs or linear.order
        x = x.clone(memory_format=torch.contiguous_format) if changed else x.contiguous()
        out, rows = x.new_empty(*x.shape[:-1], outputs), x.numel() // columns
        room = x.new_empty(rows * room_of(columns, x.dtype))
        ends = out.data_ptr(), room.data_ptr(), own_threads()
        types = c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int
        kernel(f"product{suffix(x.dtype)}", *types)(ctypes.addressof(linear), x.data_ptr(), rows, *ends)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        ids, linear = ids.contiguous(), self.as_struct()
        out = torch.empty(*ids.shape, self.shape[1], dtype=self.dtype)
        read = kernel(f"rows{suffix(self.dtype)}", c_void_p, c_void_p, c_int64, c_void_p)
        read(ctypes.addressof(linear), ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def as_struct(self) -> CLinear:
        """Return a C struct, which is valid as long as the tensors live."""
        ends = self.form, self.inputs or 0, pointer(self.order)
        return CLinear(self.weight.data_ptr(), pointer(self.bias), *self.shape, *ends)

    def dense(self) -> Tensor:
        rows, columns = self.shape
        neighbours = 2 if self.dtype == torch.bfloat16 else 1  # columns whose numbers are neighbours
        blocks = self.weight.view(-1, columns // neighbours, BLOCK, neighbours).transpose(1, 2)
        return blocks.reshape(-1, columns)[:rows].contiguous()


# numbers of the dtypes of scales in kernels.c; int8 are nested ones
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.int8: 3}


@dataclass(frozen=True, slots=True)
class NativeCodes(NativeLinear):
    """A product whose weight is coded."""

    code_format: CodeFormat = field(kw_only=True)  # of the codes
    scale: torch.dtype = field(kw_only=True)  # the dtype of the scales

    @property
    def form(self) -> CCodeFormat:
        of = self.code_format
        book = 0 if of.codebook is None else 1 + [*CODEBOOKS].index(of.codebook)
        flags = of.zeros, of.offsets, of.float8, book
        return CCodeFormat(of.bits, SCALES[self.scale], of.group, of.lowest, *flags)

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.shape[0]))


def is_native(product: Product | RowSource) -> TypeGuard[NativeLinear]:
    """Return whether the kernels run a linear layer."""
    return isinstance(product, NativeLinear)


def fits(dtype: torch.dtype, columns: int) -> bool:
    """Return whether weights [M, columns] of this dtype can be packed for the kernels."""
    return dtype in WORD and columns % WORD[dtype] == 0


def pack_native(weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> NativeLinear:
    """Return the product with a packed copy of a weight [M, K], and its bias [M]."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    missing = -rows % BLOCK
    shape = ((rows + missing) // BLOCK, columns, BLOCK)
    packed = weight.new_empty(shape) if arena is None else arena.empty(shape, weight.dtype)
    words = columns // WORD[weight.dtype]
    pack = kernel("pack", c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int)
    pack(weight.data_ptr(), rows, words, weight.dtype == torch.float16, packed.data_ptr(), own_threads())
    return NativeLinear(packed, (rows, columns), weight.dtype, padded_bias(bias))


def padded_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias [M] as the kernels read it: in float32, padded to whole blocks."""
    return None if bias is None else torch.nn.functional.pad(bias.float(), (0, -len(bias) % BLOCK))


def suffix(dtype: torch.dtype) -> str:
    return f"_{dtype_name(dtype)}"


def room_of(columns: int, dtype: torch.dtype) -> int:
    """Return the elements of work memory that a row of inputs takes: 4 bytes for each of 16 bits."""
    return 0 if dtype == torch.float32 else 2 * -(-columns // CHUNK) * CHUNK


def multiplies_integers(dtype: torch.dtype) -> bool:
    """Return whether products of this dtype with codes multiply integers (`integer_inputs`) here."""
    return bool(getattr(library(), f"foredraft_integers{suffix(dtype)}")())


class CCodes(ctypes.Structure):
    """`Codes` in kernels/code_formats.inc."""

    _fields_ = tuple((name, c_void_p) for name in ("codes", "scales", "offsets", "steps", "offset_steps"))


def coded_bytes(rows: int, columns: int, code_format: CodeFormat, scale: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of a coded weight [M, K]; `scale` is a dtype that the format leaves open."""
    scale = torch.int8 if code_format.nested else torch.float32 if code_format.wide else scale
    factor = 1 + code_format.offsets  # offsets lie as scales do
    scales = scale.itemsize * (GROUP // code_format.group) * factor
    # as `group_bytes` in kernels/code_formats.inc
    group = scales + code_format.zeros + GROUP * code_format.bits // 8
    steps = columns // SUPER * torch.float16.itemsize * factor if code_format.nested else 0
    return -(-rows // BLOCK) * BLOCK * (columns // GROUP * group + steps)


def pack_codes(
    codes: Codes, dtype: torch.dtype, bias: Tensor | None, arena: Arena | None = None
) -> NativeCodes:
    return pack_pieces(codes.shape, [codes], dtype, bias, arena)


def pack_pieces(
    shape: tuple[int, int],
    pieces: Iterable[Codes],
    dtype: torch.dtype,
    bias: Tensor | None,
    arena: Arena | None = None,
) -> NativeCodes:
    """Return the product with a packed copy of a weight; one of its pieces is in memory at a time."""
    rows, columns = shape
    product: NativeCodes | None = None
    at = 0  # the next piece's first row
    for piece in pieces:
        form, scale = piece.code_format, piece.scales.dtype
        assert form is not None and piece.group == form.group and form.holds(columns)
        if product is None:
            size = (coded_bytes(rows, columns, form, scale),)
            packed = torch.empty(size, dtype=torch.uint8) if arena is None else arena.empty(size, torch.uint8)
            order, bias = piece.order, padded_bias(bias)
            product = NativeCodes(packed, shape, dtype, bias, None, order, code_format=form, scale=scale)
        assert (form, scale) == (product.code_format, product.scale) and at % BLOCK == 0
        _put(piece, product, at // BLOCK * coded_bytes(BLOCK, columns, form, scale))
        at += len(piece.codes)
    assert product is not None and at == rows
    return product


def _put(piece: Codes, product: NativeCodes, place: int) -> None:
    numbers = piece.codes.view(torch.int8) if product.code_format.float8 else piece.codes.to(torch.int8)
    parts = numbers, piece.scales, piece.offsets, piece.steps, piece.offset_steps
    kept = [None if part is None else part.contiguous() for part in parts]
    weight, described = CCodes(*map(pointer, kept)), product.form
    ends = ctypes.addressof(described), product.weight[place:].data_ptr(), own_threads()
    pack = kernel("pack_codes", c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int)
    pack(ctypes.addressof(weight), *piece.shape, *ends)


def code_native(product: Product, bits: int, arena: Arena) -> Product:
    """Return a native product with its weight coded; itself where it has no more bits, or no whole groups."""
    assert is_native(product)
    rows, columns = product.shape
    code_format = product.code_format if isinstance(product, NativeCodes) else None
    if not CodeFormat(bits).holds(columns) or (code_format is not None and code_format.bits <= bits):
        return product
    weight, bias = product.dense(), None if product.bias is None else product.bias[:rows]
    return replace(pack_codes(quantise(weight, bits), weight.dtype, bias, arena), inputs=product.inputs)
