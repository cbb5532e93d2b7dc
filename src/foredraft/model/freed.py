"""Freed memory, given back to the system; and collections that do not walk over all that was loaded."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["collect_the_new", "freeze_what_is_loaded", "release_freed"]


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
    """Leave what a process has loaded out of garbage collection, in a process that keeps it to its end."""
    gc.collect()
    gc.freeze()


def release_freed() -> None:
    """Give freed memory back to the system, where the C library can.

    Tables over a vocabulary, of ever other sizes, leave gaps that no later one fits into: without this, a
    process that samples for minutes grows by half a megabyte a sample. Large texts of requests that were
    cancelled wait in cycles for a collection.
    """
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # malloc_trim exists in the GNU C library only
        ctypes.CDLL(None).malloc_trim(0)
