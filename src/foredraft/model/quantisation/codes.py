"""Codes: a quantised weight in the one form that all formats are read into.

A weight is code · scale, or code · scale - offset; a run of `group` columns of a row shares them. They may be
nested: integers in steps that 256 columns share. The product of a code and a scale that is nested or has 16
bits is exact in float32, so an expanded weight was rounded once, to its dtype. With a scale in float32, or
with an offset, the result is rounded to float32 first. Codes may be any small integers, those of a book too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BLOCK_ROWS",
    "CODEBOOKS",
    "FORMS",
    "GROUP",
    "PIECE",
    "SUPER",
    "Codes",
    "Coding",
    "codebook_values",
]

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
class Coding:
    """How the kernels keep a weight coded.

    Attributes:
        bits: Of a code: 2, 3, 4, 5, 6 or 8. A code is one of 2 ** bits neighbouring integers.
        group: Columns that share a scale: 32, or 16 with the bits of `FORMS`.
        unsigned: The lowest integer is 0; otherwise half of them are negative.
        zeros: With 4 bits, the integers may begin elsewhere in every group, from -16 on.
        nested: Scales are int8, in steps of float16 that `SUPER` columns share.
        offsets: Groups have offsets besides scales; those of nested scales have steps of their own.
        codebook: Codes of 4 bits are those of this key of `CODEBOOKS`.
        float8: Codes of 8 bits are float8_e4m3fn.
        wide: Scales are float32; otherwise those that are not nested may have any dtype.
    """

    bits: int
    group: int = GROUP
    unsigned: bool = False
    zeros: bool = False
    nested: bool = False
    offsets: bool = False
    codebook: str | None = None
    float8: bool = False
    wide: bool = False

    @property
    def lowest(self) -> int:
        """The lowest code, without zero points and without a codebook."""
        return 0 if self.unsigned else -(2 ** (self.bits - 1))

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest code."""
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
    def of(bits: int, group: int | None, *, symmetric: bool) -> Coding | None:
        """Return the coding of integers of 4 or 8 bits less their zero points; None where they have none.

        Args:
            bits: Of an integer.
            group: Columns that share a scale; None if a row does.
            symmetric: Every zero point is the middle.
        """
        if group is not None and group % GROUP:
            return None
        return Coding(4, zeros=not symmetric) if bits == 4 else Coding(8) if symmetric else None

    @staticmethod
    def of_all(codings: Iterable[Coding | None]) -> Coding | None:
        """Return the smallest coding that holds the codes of all; None where one has no coding, or none fits.

        Nested scales beside others become float32, in which they are exact.

        Examples:
            >>> Coding.of_all([Coding(5), Coding(8)])
            Coding(8)
        """
        found = list(codings)
        known = [coding for coding in found if coding is not None]
        if len(known) < len(found) or len({coding.float8 for coding in known}) > 1:
            return None
        first = known[0]
        if len(set(known)) == 1:
            return first
        nested = all(coding.nested for coding in known)
        of_scales: dict[str, Any] = {
            "nested": nested,
            "offsets": any(coding.offsets for coding in known),
            "wide": any(coding.wide or (coding.nested and not nested) for coding in known),
        }
        group = min(coding.group for coding in known)
        if len({(coding.bits, coding.codebook, coding.group) for coding in known}) == 1 and (
            first.float8 or first.codebook is not None
        ):
            return replace(first, **of_scales)
        if set(known) <= {Coding(4), Coding(4, zeros=True)}:
            return Coding(4, zeros=True)
        low, high = min(coding.range[0] for coding in known), max(coding.range[1] for coding in known)
        for bits, columns in FORMS:
            for unsigned in (False, True):
                form = Coding(bits, columns, unsigned, **of_scales)
                if columns == group and form.range[0] <= low and high <= form.range[1]:
                    return form
        return None


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight [M, K].

    Attributes:
        codes: [M, K] of a dtype whose values are exact in float32, zero points subtracted already.
        scales: [M, ceil(K / group)], of any float dtype; nested: int8.
        group: Columns that share a scale; the last group of a row may be shorter.
        coding: How the kernels can keep it coded; None where they cannot.
        steps: Of nested scales, [M, K / SUPER] float16.
        offsets: As `scales`, subtracted from the scaled codes; None: there are none.
        offset_steps: Of nested offsets, [M, K / SUPER] float16.
        order: [K] int32: column j of codes is column order[j] of the weight. So the columns of a group lie
            together. None: they are in the weight's order.
    """

    codes: Tensor
    scales: Tensor
    group: int
    coding: Coding | None = None
    steps: Tensor | None = None
    offsets: Tensor | None = None
    offset_steps: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        rows, columns = self.codes.shape
        return rows, columns

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [M, K], rounded once to `dtype`."""
        expanded = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        self.expand_into(expanded)
        return expanded

    def expand_into(self, expanded: Tensor) -> None:
        """Write the weight, rounded once, into `expanded` [M, K]; a few rows are in float32 at a time."""
        rows, columns = self.shape
        step = max(1, PIECE // columns)
        places = slice(None) if self.order is None else self.order.long()
        for first in range(0, rows, step):
            expanded[first : first + step, places] = self._values(slice(first, first + step)).to(
                expanded.dtype
            )

    def _values(self, rows: slice) -> Tensor:
        """Return rows of the weight, in float32."""
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
        """Return its tensors [M, ...] by the names of the attributes."""
        names = ("codes", "scales", "steps", "offsets", "offset_steps")
        return {name: found for name in names if (found := getattr(self, name)) is not None}

    @staticmethod
    def can_join(parts: Sequence[Codes]) -> bool:
        """Return whether the kernels can order the inputs for all parts at once."""
        first, *others = [part.order for part in parts]
        if first is None:
            return all(other is None for other in others)
        same = all(other is not None and torch.equal(first, other) for other in others)
        return same and len(first) <= MAX_ORDERED

    @staticmethod
    def joined(parts: Sequence[Codes]) -> Codes:
        """Return the weights below each other, as one, in the coding that holds all of them.

        Scales of several dtypes become float32, and so do nested ones beside others. The columns of all are
        in one order (`can_join`).
        """
        assert Codes.can_join(parts)
        coding = Coding.of_all(part.coding for part in parts)
        assert coding is not None
        parts = [part._coded(coding) for part in parts]
        if len({part.scales.dtype for part in parts}) > 1:
            parts = [part._widened() for part in parts]
        assert len({tuple(part._tensors()) for part in parts}) == 1, "of one coding"
        below: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0]._tensors()
        }
        return replace(parts[0], **below)

    def _coded(self, coding: Coding) -> Codes:
        """Return the same weight with another coding, which holds it."""
        factor = self.group // coding.group
        groups = self.shape[1] // coding.group  # the last of the present ones may be shorter
        found = self if coding.nested or self.steps is None else self._widened()
        scales = found.scales.repeat_interleave(factor, 1)[:, :groups]
        offsets, offset_steps = found.offsets, found.offset_steps
        if offsets is not None:
            offsets = offsets.repeat_interleave(factor, 1)[:, :groups]
        elif coding.offsets:
            offsets = torch.zeros_like(scales)
            offset_steps = None if found.steps is None else torch.zeros_like(found.steps)
        return replace(
            found,
            scales=scales,
            group=coding.group,
            coding=coding,
            offsets=offsets,
            offset_steps=offset_steps,
        )

    def _widened(self) -> Codes:
        """Return the same weight with scales and offsets in float32."""
        offsets = None if self.offsets is None else self._in_steps(self.offsets, self.offset_steps)
        scales = self._in_steps(self.scales, self.steps)
        return replace(self, scales=scales, steps=None, offsets=offsets, offset_steps=None)


def codebook_values(book: str, numbers: Tensor) -> Tensor:
    """Return the codes [...] int8 that numbers [...] of 4 bits stand for in a book, a key of `CODEBOOKS`."""
    return torch.tensor(CODEBOOKS[book], dtype=torch.int8, device=numbers.device)[numbers.int()]
