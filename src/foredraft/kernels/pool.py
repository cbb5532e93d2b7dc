"""Memory of the kernels: what threads of their pool may still read, and zeroed memory in huge pages.

A thread that the system took off its core within a piece of work may come back after the call, when others
have done its piece. It writes nothing then, but reads on in the tensors of the call for some microseconds, so
these live until no such thread is left. Without huge pages
(https://docs.kernel.org/admin-guide/mm/transhuge.html) memory is ordinary.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import mmap
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.compilation import library

LATE_THREADS = 2  # a result of the kernels, as in kernels.c
MOST = 256  # calls whose tensors are kept, before one waits for the threads
NAP = 0.0005  # seconds between two looks

_kept: list[Any] = []
_lock = threading.Lock()


def keep(*used: Any) -> None:
    """Keep objects until no thread is late any more, at least."""
    with _lock:
        if _settled() or (len(_kept) >= MOST and _wait()):
            _kept.clear()
        _kept.append(used)


def settle() -> None:
    """Wait until no thread is late any more, for milliseconds, and release what was kept."""
    with _lock:
        if _kept and _wait():
            _kept.clear()


atexit.register(settle)  # before the interpreter frees what a late thread reads


def _wait() -> bool:
    while not _settled():
        time.sleep(NAP)
    return True


def _settled() -> bool:
    kernels = library()
    assert kernels is not None, "a call of the kernels has returned"
    return bool(kernels.foredraft_settled())


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


def as_fast_as_arena(tensors: Sequence[Tensor]) -> bool:
    """Read the tensors of a mapped file, and return whether most lie in huge pages, if Linux has them at all.

    In small pages of a file, products took up to 1.1 of the time. ext4 has huge ones since Linux 6.16.
    """
    if sys.platform != "linux":
        return True
    start = min(tensor.data_ptr() for tensor in tensors) // mmap.PAGESIZE * mmap.PAGESIZE
    size = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8)[::HUGE_PAGE].sum()  # reads each page
    inside = False
    with suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as maps:
        for name, *values in map(str.split, maps):
            if "-" in name:  # the addresses of a map
                inside = int(name.partition("-")[0], 16) == start
            elif inside and name == "FilePmdMapped:":
                return int(values[0]) * 1024 > sum(tensor.nbytes for tensor in tensors) / 2
    return False


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
