"""Bounds that the system sets on this process, as a full disk sets them."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_bytes(most: int) -> Iterator[None]:
    """Let no file that this process writes grow beyond so many bytes, until the block ends."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
