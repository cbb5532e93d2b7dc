"""Map ranges of files into memory.

Contract: no more of a file is mapped than its caller asks for. The kernel reads the pages when they are
touched, and drops them when memory is short. A map of a whole file would be refused where the file is larger
than the machine's memory (https://www.kernel.org/doc/html/latest/mm/overcommit-accounting.html).
"""

from __future__ import annotations

import errno
import mmap
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["mapped_bytes"]


def mapped_bytes(file: BinaryIO, start: int, size: int) -> Tensor:
    """Return a range of an open file as a tensor of bytes, which stays valid when the file is closed.

    What is written to the tensor does not reach the file: the map is private, because PyTorch warns of
    memory that cannot be written.

    Args:
        file: The file.
        start: The first byte.
        size: The number of bytes.

    Raises:
        OSError: The system refuses the map, or the file has become shorter.
        MemoryError: There is no room for the map.
    """
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
