"""Zeroed memory in huge pages, which need fewer address translations while weights and caches are read.

Contract: memory is committed when it is first touched. Where the system has no huge pages or refuses them
(https://docs.kernel.org/admin-guide/mm/transhuge.html), the functions return ordinary memory.
"""

from __future__ import annotations

import math
import mmap
import sys

import torch
from torch import Tensor

__all__ = ["Arena", "zeros"]

HUGE_PAGE = 2**21  # bytes of a huge page on x86-64, and on ARM with 4 KiB pages
REGION = 32 * HUGE_PAGE  # bytes that an arena asks for at a time: enough for several weights
CACHE_LINE = 64  # bytes
CPU = torch.device("cpu")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return zeros; on a CPU, a tensor of at least one huge page starts where a huge page does."""
    values = math.prod(shape)
    size = values * dtype.itemsize
    if device.type != "cpu" or sys.platform != "linux" or size < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # no huge pages, or no memory, for which PyTorch has the better error
        return torch.zeros(shape, dtype=dtype)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return torch.frombuffer(pages, dtype=dtype, count=values, offset=start).view(shape)


class Arena:
    """An allocator of tensors that are freed together; it packs them into a few large regions."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the current region

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor that starts at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        padded = math.ceil(size / CACHE_LINE) * CACHE_LINE
        if len(self._rest) < padded:  # the rest of the old region is never touched, so it costs no memory
            self._rest = zeros((max(padded, REGION),), torch.uint8)
        memory, self._rest = self._rest[:size], self._rest[padded:]
        return memory.view(dtype).view(shape)
