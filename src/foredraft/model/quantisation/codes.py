"""Codes: a quantised weight in the one form that all formats are read into.

A weight is code · scale, with one scale for a run of `group` columns of a row. The product of a code and a
scale of 16 bits is exact in float32, so an expanded weight was rounded once, to its dtype. With a scale in
float32, or with an offset, the result is rounded to float32 first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GROUP", "PIECE", "Codes", "Coding", "codable"]

GROUP = 32  # columns that share a scale in a weight that is kept coded
PIECE = 2**22  # weights that are expanded or quantised at a time: it bounds the memory


def codable(columns: int) -> bool:
    """Return whether weights [M, columns] can be kept coded: they need whole groups."""
    return columns % GROUP == 0


@dataclass(frozen=True, slots=True)
class Coding:
    """How the kernels keep a weight coded.

    Attributes:
        bits: 4 or 8: a code is one of 2 ** bits neighbouring integers, of which half are negative.
        zeros: With 4 bits, these integers may begin elsewhere in every group, from -16 on.
    """

    bits: int
    zeros: bool = False

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
        return Coding(4, not symmetric) if bits == 4 else Coding(8) if symmetric else None

    @staticmethod
    def of_all(codings: Iterable[Coding | None]) -> Coding | None:
        """Return the coding that holds the codes of all; None where one of them has none."""
        found = list(codings)
        known = [coding for coding in found if coding is not None]
        if len(known) < len(found):
            return None
        bits = max(coding.bits for coding in known)
        return Coding(bits, bits == 4 and any(coding.zeros for coding in known))


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight [M, K].

    Attributes:
        codes: [M, K] of a dtype whose values are exact in float32, zero points subtracted already.
        scales: [M, ceil(K / group)], of any float dtype.
        group: Columns that share a scale; the last group of a row may be shorter.
        coding: How the kernels can keep it coded; None where they cannot.
        offsets: [M, K / group] float32, subtracted from the scaled codes; None: there are none.
    """

    codes: Tensor
    scales: Tensor
    group: int
    coding: Coding | None = None
    offsets: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        rows, columns = self.codes.shape
        return rows, columns

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [M, K], rounded once to `dtype`; a few rows are in float32 at a time."""
        rows, columns = self.shape
        expanded = torch.empty(rows, columns, dtype=dtype, device=self.codes.device)
        step = max(1, PIECE // columns)
        for first in range(0, rows, step):
            expanded[first : first + step] = self._values(slice(first, first + step))
        return expanded

    def _values(self, rows: slice) -> Tensor:
        """Return rows of the weight, in float32."""
        full = self.shape[1] // self.group  # groups that are not short
        short = full * self.group  # where a short one begins
        values, scales = self.codes[rows].to(torch.float32, copy=True), self.scales[rows].float()
        grouped = values[:, :short].view(len(values), full, self.group).mul_(scales[:, :full, None])
        if self.offsets is not None:
            grouped.sub_(self.offsets[rows, :, None])
        values[:, short:].mul_(scales[:, full:])
        return values

    @staticmethod
    def joined(parts: Sequence[Codes]) -> Codes:
        """Return the weights below each other, as one; their groups must be as long.

        Scales of several dtypes become float32.
        """
        [group] = {part.group for part in parts}
        scales = [part.scales for part in parts]
        if len({each.dtype for each in scales}) > 1:
            scales = [each.float() for each in scales]
        coding = Coding.of_all(part.coding for part in parts)
        return Codes(torch.cat([part.codes for part in parts]), torch.cat(scales), group, coding)

    def regrouped(self, group: int) -> Codes:
        """Return the same weight with a scale for every `group` columns, which divide the present groups."""
        if group == self.group:
            return self
        scales = self.scales.repeat_interleave(self.group // group, dim=1)
        return Codes(self.codes, scales, group, self.coding)
