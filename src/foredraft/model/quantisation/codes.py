"""Codes: a quantised weight in the one form that all formats are read into.

A weight is code · scale, with one scale for a run of `group` columns of a row. The product of a code and a
scale of 16 bits is exact in float32, so an expanded weight was rounded once, to its dtype. With a scale in
float32, the product is rounded to float32 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Codes"]


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised weight [M, K].

    Attributes:
        codes: [M, K] of a dtype whose values are exact in float32, zero points subtracted already.
        scales: [M, ceil(K / group)], of any float dtype.
        group: Columns that share a scale; the last group of a row may be shorter.
        bits: That a code needs; None where it is no integer.
    """

    codes: Tensor
    scales: Tensor
    group: int
    bits: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        rows, columns = self.codes.shape
        return rows, columns

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [M, K], rounded once to `dtype`."""
        rows, columns = self.shape
        full = columns // self.group  # groups that are not short
        short = full * self.group  # where a short one begins
        values, scales = self.codes.to(torch.float32, copy=True), self.scales.float()
        values[:, :short].view(rows, full, self.group).mul_(scales[:, :full, None])
        values[:, short:].mul_(scales[:, full:])
        return values.to(dtype)

    @staticmethod
    def joined(parts: Sequence[Codes]) -> Codes:
        """Return the weights below each other, as one; their groups must be as long."""
        [(group, bits)] = {(part.group, part.bits) for part in parts}
        codes, scales = [part.codes for part in parts], [part.scales for part in parts]
        return Codes(torch.cat(codes), torch.cat(scales), group, bits)
