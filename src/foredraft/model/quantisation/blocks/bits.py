"""Numbers of a few bits in bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fields", "float16", "int8", "uint16", "uint32"]


def fields(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of so many bits that bytes hold, the lowest bits first.

    Args:
        packed: [..., N] uint8.
        bits: 1, 2 or 4.

    Returns:
        [..., 8 / bits, N] uint8: first the numbers in the lowest bits of all bytes.

    Examples:
        >>> fields(torch.tensor([0x21, 0x43], dtype=torch.uint8), 4).tolist()
        [[1, 3], [2, 4]]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    found: Tensor = (packed[..., None, :] >> shifts) & (2**bits - 1)
    return found


def float16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2 N] as numbers [B, N]."""
    return stored.contiguous().view(torch.float16)


def int8(stored: Tensor) -> Tensor:
    """Return bytes as signed numbers."""
    return stored.contiguous().view(torch.int8)


def uint16(stored: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2 N] as numbers [B, N] of int32."""
    low, high = stored.view(*stored.shape[:-1], -1, 2).int().unbind(-1)
    return low | (high << 8)


def uint32(stored: Tensor) -> Tensor:
    """Return four bytes each [B, 4 N] as numbers [B, N] of int64."""
    low, high = uint16(stored).long().view(*stored.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 16)
