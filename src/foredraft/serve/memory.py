"""Memory that large requests leave behind: the C library keeps what they freed until a call returns it."""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]


def give_back() -> None:
    """Give the free memory of the process back to the system, where the C library can: glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another library; Windows
        return
    trim(0)
