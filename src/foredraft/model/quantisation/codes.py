"""Codes: a quantised weight in the one form that all formats are read into, and that 16-bit weights are
rounded to.

A weight is code · scale, or code · scale - offset; a run of `group` columns of a row shares them. They may be
nested: integers in steps that 256 columns share. The product of a code and a scale that is nested or has 16
bits is exact in float32, so an expanded weight was rounded once. `define` takes for each group the
least-squares scale of its codes, the best of several, in bfloat16; a C kernel computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.compilation import kernel, library
from foredraft.model.memory import dtype_name

BLOCK_ROWS = 32  # rows that are packed together, so pieces of a weight have whole blocks of them
GROUP = 32  # columns that are coded together in a weight that is kept coded
SUPER = 256  # columns that share the step of their nested scales
MOST = 2**18  # columns of a weight with offsets: the kernels keep the sums of 16 inputs each
MAX_ORDERED = 2**16  # columns of a weight whose columns are ordered: the kernels keep a row of the inputs
PIECE = 2**22  # weights that are expanded or quantised at a time: it bounds the memory
# bits of a code and columns of a group that the kernels keep, from the smallest on
FORMS = ((2, 16), (3, 16), (4, 32), (5, 32), (6, 16), (8, 32), (8, 16))
# Codes that numbers of 4 bits stand for. "iq4": of IQ4_NL and IQ4_XS in https://github.com/ggml-org/ggml.
# "mxfp4": twice the values of E2M1 in the OCP Microscaling Formats 1.0, as ggml counts.
CODEBOOKS = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}


@dataclass(frozen=True, slots=True)
class CodeFormat:
    bits: int  # of a code: 2, 3, 4, 5, 6 or 8. A code is one of 2 ** bits neighbouring integers
    group: int = GROUP  # columns that share a scale: 32, or 16 with the bits of `FORMS`
    unsigned: bool = False  # the lowest integer is 0; otherwise half of them are negative
    zeros: bool = False  # with 4 bits, the integers may begin elsewhere in every group, from -16 on
    nested: bool = False  # scales are int8, in steps of float16 that `SUPER` columns share
    offsets: bool = False  # besides scales; those of nested scales have steps of their own
    codebook: str | None = None  # codes of 4 bits are those of this key of `CODEBOOKS`
    float8: bool = False  # codes of 8 bits are float8_e4m3fn
    wide: bool = False  # scales are float32; otherwise those that are not nested may have any dtype

    @property
    def lowest(self) -> int:
        """The lowest code, without zero points and without a codebook."""
        return 0 if self.unsigned else -(2 ** (self.bits - 1))

    @property
    def range(self) -> tuple[int, int]:
        if self.codebook is not None:
            values = CODEBOOKS[self.codebook]
            return min(values), max(values)
        return -16 if self.zeros else self.lowest, self.lowest + 2**self.bits - 1

    def holds(self, columns: int) -> bool:
        """Return whether weights [M, columns] can be coded so: they need whole groups."""
        if columns % (SUPER if self.nested else GROUP):
            return False
        return columns <= MOST or not self.offsets

    @staticmethod
    def of(bits: int, group: int | None, *, symmetric: bool) -> CodeFormat | None:
        """Return the format of integers of 4 or 8 bits less their zero points; None where there is none."""
        if group is not None and group % GROUP:
            return None
        return CodeFormat(4, zeros=not symmetric) if bits == 4 else CodeFormat(8) if symmetric else None

    @staticmethod
    def of_all(code_formats: Iterable[CodeFormat | None]) -> CodeFormat | None:
        """Return the smallest format for the codes of all, with nested scales beside others in float32.

        Returns None where one has no format, or none fits.
        """
        found = list(code_formats)
        known = [each for each in found if each is not None]
        if len(known) < len(found) or len({each.float8 for each in known}) > 1:
            return None
        first = known[0]
        if len(set(known)) == 1:
            return first
        nested = all(each.nested for each in known)
        of_scales: dict[str, Any] = {
            "nested": nested,
            "offsets": any(each.offsets for each in known),
            "wide": any(each.wide or (each.nested and not nested) for each in known),
        }
        group = min(each.group for each in known)
        if len({(each.bits, each.codebook, each.group) for each in known}) == 1 and (
            first.float8 or first.codebook is not None
        ):
            return replace(first, **of_scales)
        if set(known) <= {CodeFormat(4), CodeFormat(4, zeros=True)}:
            return CodeFormat(4, zeros=True)
        low, high = min(each.range[0] for each in known), max(each.range[1] for each in known)
        for bits, columns in FORMS:
            for unsigned in (False, True):
                form = CodeFormat(bits, columns, unsigned, **of_scales)
                if columns == group and form.range[0] <= low and high <= form.range[1]:
                    return form
        return None


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight [M, K]."""

    codes: Tensor  # [M, K] of a dtype whose values are exact in float32, zero points subtracted already
    scales: Tensor  # [M, ceil(K / group)], of any float dtype; nested: int8
    group: int  # columns that share a scale; the last group of a row may be shorter
    code_format: CodeFormat | None = None  # how the kernels can keep it coded; None where they cannot
    steps: Tensor | None = None  # of nested scales, [M, K / SUPER] float16
    offsets: Tensor | None = None  # as `scales`, subtracted from the scaled codes; None: there are none
    offset_steps: Tensor | None = None  # of nested offsets, [M, K / SUPER] float16
    # [K] int32: column j of codes is column order[j] of the weight, so that groups lie together
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def expand(self, dtype: torch.dtype) -> Tensor:
        expanded = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        self.expand_into(expanded)
        return expanded

    def expand_into(self, expanded: Tensor) -> None:
        """Write the weight, rounded once, into `expanded` [M, K]; a few rows are in float32 at a time."""
        rows, columns = self.shape
        step = max(1, PIECE // columns)
        places = slice(None) if self.order is None else self.order.long()
        for first in range(0, rows, step):
            piece = slice(first, first + step)
            expanded[piece, places] = self._values(piece).to(expanded.dtype)

    def _values(self, rows: slice) -> Tensor:
        full = self.shape[1] // self.group  # groups that are not short
        short = full * self.group  # where a short one begins
        values = self.codes[rows].to(torch.float32, copy=True)
        scales = self._in_steps(self.scales, self.steps, rows)
        grouped = values[:, :short].view(len(values), full, self.group).mul_(scales[:, :full, None])
        if self.offsets is not None:
            grouped.sub_(self._in_steps(self.offsets, self.offset_steps, rows)[..., None])
        values[:, short:].mul_(scales[:, full:])
        return values

    def _in_steps(self, numbers: Tensor, steps: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """Return rows of scales or offsets in float32, in which they are exact."""
        found = numbers[rows].float()
        if steps is None:
            return found
        return found * steps[rows].float().repeat_interleave(SUPER // self.group, 1)

    @staticmethod
    def gathered(rows: int, pieces: Iterable[Codes]) -> Codes:
        """Return a weight of so many rows, of whose rows the pieces are; one is in memory at a time."""
        whole: Codes | None = None
        first = 0
        for piece in pieces:
            if len(piece.codes) == rows:
                return piece
            if whole is None:
                empty: dict[str, Any] = {
                    name: tensor.new_empty(rows, tensor.shape[1]) for name, tensor in piece._tensors().items()
                }
                whole = replace(piece, **empty)
            for name, tensor in piece._tensors().items():
                getattr(whole, name)[first : first + len(tensor)] = tensor
            first += len(piece.codes)
        assert whole is not None and first == rows
        return whole

    def in_order(self, order: Tensor) -> Codes:
        """Return the weight with its rows in another order, [M]: row i is row order[i] of this one."""
        rows: dict[str, Any] = {name: tensor[order] for name, tensor in self._tensors().items()}
        return replace(self, **rows)

    def _tensors(self) -> dict[str, Tensor]:
        names = ("codes", "scales", "steps", "offsets", "offset_steps")
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    @staticmethod
    def can_join(parts: Sequence[Codes]) -> bool:
        first, *others = [part.order for part in parts]
        if first is None:
            return all(other is None for other in others)
        same = all(other is not None and torch.equal(first, other) for other in others)
        return same and len(first) <= MAX_ORDERED

    @staticmethod
    def joined(parts: Sequence[Codes]) -> Codes:
        """Return the weights below each other, as one, in the format that holds all (`CodeFormat.of_all`)."""
        assert Codes.can_join(parts)
        code_format = CodeFormat.of_all(part.code_format for part in parts)
        assert code_format is not None
        parts = [part._coded(code_format) for part in parts]
        if len({part.scales.dtype for part in parts}) > 1:
            parts = [part._widened() for part in parts]
        assert len({tuple(part._tensors()) for part in parts}) == 1, "of one format"
        names = parts[0]._tensors()
        below: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return replace(parts[0], **below)

    def _coded(self, code_format: CodeFormat) -> Codes:
        factor = self.group // code_format.group
        groups = self.shape[1] // code_format.group  # the last of the present ones may be shorter
        found = self if code_format.nested or self.steps is None else self._widened()
        scales = found.scales.repeat_interleave(factor, 1)[:, :groups]
        offsets, offset_steps = found.offsets, found.offset_steps
        if offsets is not None:
            offsets = offsets.repeat_interleave(factor, 1)[:, :groups]
        elif code_format.offsets:
            offsets = torch.zeros_like(scales)
            offset_steps = None if found.steps is None else torch.zeros_like(found.steps)
        parts: dict[str, Any] = {"scales": scales, "offsets": offsets, "offset_steps": offset_steps}
        return replace(found, group=code_format.group, code_format=code_format, **parts)

    def _widened(self) -> Codes:
        offsets = None if self.offsets is None else self._in_steps(self.offsets, self.offset_steps)
        scales = self._in_steps(self.scales, self.steps)
        return replace(self, scales=scales, steps=None, offsets=offsets, offset_steps=None)


def codebook_values(book: str, numbers: Tensor) -> Tensor:
    """Return the codes [...] int8 that numbers [...] of 4 bits stand for in a book, a key of `CODEBOOKS`."""
    return torch.tensor(CODEBOOKS[book], dtype=torch.int8, device=numbers.device)[numbers.int()]


BITS = {"int4": 4, "int8": 8}  # name -> bits of a code
# The largest weight of a group becomes the code -2 ** (bits - 1) times one of these.
SHARES = {4: (1.0, 0.95, 0.9, 0.85, 0.8), 8: (1.0,)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernel takes


def quantise(weight: Tensor, bits: int) -> Codes:
    """Return a finite weight [M, K] as codes; K is a multiple of `GROUP`."""
    if library() is None or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return define(weight, bits)
    weight = weight.contiguous()
    (rows, columns), shares = weight.shape, SHARES[bits]
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.bfloat16)
    types = c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int
    kernel(f"quantise_{dtype_name(weight.dtype)}", *types)(
        weight.data_ptr(), rows, columns, bits, (c_float * len(shares))(*shares), len(shares),
        codes.data_ptr(), scales.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return Codes(codes, scales, GROUP, CodeFormat(bits))


def define(weight: Tensor, bits: int) -> Codes:
    """Return what `quantise` returns, by PyTorch's operators."""
    rows, columns = weight.shape
    groups = columns // GROUP
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
    step = max(1, PIECE // columns)
    for row in range(0, rows, step):
        piece = weight[row : row + step].float().view(-1, groups, GROUP)
        coded, scale = _piece(piece, bits)
        codes[row : row + step] = coded.view(-1, columns)
        scales[row : row + step] = scale
    return Codes(codes, scales, GROUP, CodeFormat(bits))


def _piece(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes [M, G, 32] and scales [M, G] of weights [M, G, 32]."""
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf, dtype=torch.float64)
    for share in SHARES[bits]:
        codes = _codes(w, extreme * (torch.tensor(share) / -(2 ** (bits - 1))), bits).double()
        squares = (codes * codes).sum(-1, keepdim=True)
        scale = ((codes * w).sum(-1, keepdim=True) / squares.clamp_min(1)).float().bfloat16().float()
        error = (_codes(w, scale, bits).double() * scale - w).square_().sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return _codes(w, best, bits).to(torch.int8), best.squeeze(-1).bfloat16()


def _codes(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (w * inverse).clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).round_()
