"""The block formats of GGUF files: what the bytes of a row of blocks stand for.

Contract: `unpack` turns the stored bytes of a matrix into codes; their `expand` is the definition. In float32
it gives the bits of `gguf.quants.dequantize`. In another dtype a weight of Q4_0, Q8_0 or Q6_K was rounded
once. That of Q4_K is a difference, which float32 rounds first.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h and
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.model.quantisation.codes import Codes

__all__ = ["UNPACKED", "OffsetCodes", "unpack"]


@dataclass(frozen=True, slots=True)
class OffsetCodes:
    """A quantised weight [M, K], code · scale - offset; the products are exact in float32.

    Attributes:
        codes: [M, K], uint8.
        scales: [M, K / group], float32.
        offsets: [M, K / group], float32.
        group: Columns that share a scale and an offset.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the weight."""
        rows, columns = self.codes.shape
        return rows, columns

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [M, K], rounded to float32 and then to `dtype`."""
        grouped = self.codes.float().view(*self.scales.shape, self.group)
        expanded = grouped * self.scales[..., None] - self.offsets[..., None]
        return expanded.view(self.shape).to(dtype)


def unpack(kind: str, stored: Tensor, columns: int) -> Codes | OffsetCodes:
    """Return the codes of a matrix.

    Args:
        kind: A key of `UNPACKED`.
        stored: The bytes of each row, [M, bytes] uint8.
        columns: K, a multiple of the values in a block.
    """
    size, read = UNPACKED[kind]
    return read(stored.view(-1, size), stored.shape[0], columns)


def _q8_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 32 codes int8."""
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return Codes(codes.view(rows, columns), _float16(blocks[:, :2]).view(rows, -1), 32)


def _q4_0(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack d float16, 16 bytes; their low halves are the first 16 codes, their high halves the others."""
    codes = torch.cat(_halves(blocks[:, 2:]), dim=1).to(torch.int8) - 8
    return Codes(codes.view(rows, columns), _float16(blocks[:, :2]).view(rows, -1), 32)


def _q4_k(blocks: Tensor, rows: int, columns: int) -> OffsetCodes:
    """Unpack d and dmin float16, 8 scales and 8 minimums of 6 bits in 12 bytes, 128 bytes of codes.

    Each 32 bytes hold the codes of two groups: the low halves those of the first.
    """
    d, dmin = _float16(blocks[:, :2]).float(), _float16(blocks[:, 2:4]).float()
    scales, minimums = _six_bits(blocks[:, 4:16])
    codes = torch.stack(_halves(blocks[:, 16:].reshape(-1, 4, 32)), dim=2)
    return OffsetCodes(
        codes.view(rows, columns),
        (d * scales.float()).view(rows, -1),
        (dmin * minimums.float()).view(rows, -1),
        32,
    )


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and the 8 minimums [B, 8] that share 12 bytes [B, 12].

    The first four of each are the low 6 bits of a byte. The other four have their low 4 bits in the last four
    bytes, and their high 2 bits above those of the first four.
    """
    low, high, mixed = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([low & 63, (mixed & 15) | ((low >> 6) << 4)], dim=1)
    return scales, torch.cat([high & 63, (mixed >> 4) | ((high >> 6) << 4)], dim=1)


def _q6_k(blocks: Tensor, rows: int, columns: int) -> Codes:
    """Unpack 128 bytes of low halves, 64 bytes of 2 high bits each, 16 scales int8, d float16.

    Each 64 low bytes and 32 high bytes make 128 codes: the low halves of 64 bytes, then their high halves.
    """
    low = torch.stack(_halves(blocks[:, :128].reshape(-1, 2, 64)), dim=2).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    codes = (low | (((high >> shifts) & 3) << 4)).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _float16(blocks[:, 208:]).float()
    return Codes(codes.view(rows, columns), scales.view(rows, -1), 16)


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 4 bits of bytes."""
    return packed & 15, packed >> 4


def _float16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2] as numbers [B, 1]."""
    return stored.contiguous().view(torch.float16)


# kind -> bytes of a block, and function of (blocks [B, bytes], rows, columns)
UNPACKED: dict[str, tuple[int, Callable[[Tensor, int, int], Codes | OffsetCodes]]] = {
    "Q4_0": (18, _q4_0),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
