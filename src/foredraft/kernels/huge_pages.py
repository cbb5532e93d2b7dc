"""Zeroed memory in huge pages, where the system has them: fewer addresses to look up while it is read.

Contract: nothing is committed before it is touched. Where the system cannot be asked for huge pages, or says
no (https://docs.kernel.org/admin-guide/mm/transhuge.html), it is ordinary memory.
"""

from __future__ import annotations

import math
import mmap
import sys

import torch
from torch import Tensor

__all__ = ["Arena", "zeros"]

HUGE = 2**21  # bytes of a huge page, on most CPUs
REGION = 32 * HUGE
LINE = 64
CPU = torch.device("cpu")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Zeros that begin where a huge page does, on CPUs."""
    values = math.prod(shape)
    size = values * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size < HUGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them, or no memory, which PyTorch says better
        return torch.zeros(shape, dtype=dtype)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE
    return torch.frombuffer(pages, dtype=dtype, count=values, offset=start).view(shape)


class Arena:
    """Many tensors that live and die together, one after the other in few regions."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor of them, of any values; it begins where a cache line does."""
        size = math.prod(shape) * dtype.itemsize
        taken = math.ceil(size / LINE) * LINE
        if len(self._rest) < taken:  # what is left is never touched
            self._rest = zeros((max(taken, REGION),), torch.uint8)
        mine, self._rest = self._rest[:size], self._rest[taken:]
        return mine.view(dtype).view(shape)
