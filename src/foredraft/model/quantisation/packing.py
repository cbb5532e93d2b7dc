"""Numbers of 4 or 8 bits: how int32 words hold them, and how zero points are subtracted."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "subtract_zeros", "unpack", "words"]


def words(count: int, bits: int) -> int:
    """Return the number of int32 words that hold `count` numbers."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return words [M, W] of codes [M, K]: each is stored as code + 2^(bits - 1), the lowest bits first."""
    numbers = (codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    if bits == 4:
        numbers = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    return numbers.contiguous().view(torch.int32)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers in words, the lowest bits of a word first.

    Args:
        packed: [..., W] int32.
        bits: Bits of a number, 4 or 8.

    Returns:
        [..., W * 32 / bits] uint8: the bits of each number, read as unsigned.
    """
    numbers = packed.contiguous().view(torch.uint8)  # little-endian, as safetensors files are
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def subtract_zeros(stored: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the codes: the stored numbers less the zero points of their groups.

    Args:
        stored: [M, K] numbers of `bits` bits.
        zeros: [M, G] or [1, 1]; G divides K.
        bits: Bits of a number.

    Returns:
        [M, K] int8, or int16 where differences need 9 bits.
    """
    dtype = torch.int8 if bits == 4 else torch.int16
    grouped = stored.to(dtype).reshape(len(stored), zeros.shape[1], -1)  # [M, G, group]
    return (grouped - zeros.to(dtype)[:, :, None]).flatten(1)
