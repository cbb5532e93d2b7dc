"""Memory: ranges of files mapped into it, freed memory given back, values moved between host and device.

No more of a file is mapped than its caller asks for: a map of a whole file would be refused where the file is
larger than the memory (https://www.kernel.org/doc/html/latest/mm/overcommit-accounting.html).

Contract: a round synchronises with the device once, at its end. `torch.tensor(values, device="cuda")` would
block the host until the device is idle, several times a round; a copy from pinned memory does not.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import torch
from torch import Tensor


@contextmanager
def collect_the_new() -> Iterator[None]:
    """Leave out of garbage collection what is there already: to walk over it takes 0.13 s."""
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def freeze_what_is_loaded() -> None:
    gc.collect()
    gc.freeze()


def release_freed() -> None:
    """Give freed memory back to the system, where the C library can.

    Tables over a vocabulary leave gaps that no later one fits into, half a megabyte a sample; large texts of
    cancelled requests wait in cycles for a collection.
    """
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # malloc_trim exists in the GNU C library only
        ctypes.CDLL(None).malloc_trim(0)


def mapped_bytes(file: BinaryIO, start: int, size: int) -> Tensor:
    """Return a range of an open file as bytes, valid when the file is closed; the map is private."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    begin = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        mapped = mmap.mmap(file.fileno(), start + size - begin, access=mmap.ACCESS_COPY, offset=begin)
    except ValueError as error:  # the range ends behind the file
        raise OSError(0, "it has become shorter") from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start - begin)


HOST = ("cpu",)  # device types whose memory the host reads directly


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as options spell it, "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type in HOST


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy values to a device without blocking the host."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    pinned = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy several tensors to the host with a single synchronisation."""
    if on_host(tensors[0]):
        return list(tensors)
    # float32 travels as int32 bits, so that one concatenation holds all dtypes without rounding
    integers = [bits(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in integers]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [
        (part.to(torch.int32).view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work, so that a timing covers it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_gib(size: int) -> str:
    """Return a number of bytes as people read it.

    Examples:
        >>> as_gib(3 * 2**30), as_gib(2**27)
        ('3.0 GiB', '0.125 GiB')
    """
    return f"{size / 2**30:.{1 if size >= 2**30 else 3}f} GiB"
