"""Bounds that the system sets on this process, as a full disk sets them."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def soft_limit(kind: int, most: int) -> Iterator[None]:
    """Lower one of the limits of `resource` until the block ends."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def no_more_bytes(most: int) -> Iterator[None]:
    """Let no file that this process writes grow beyond so many bytes, until the block ends."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python keeps what it wrote half
    try:
        with soft_limit(resource.RLIMIT_FSIZE, most):
            yield
    finally:
        sys.dont_write_bytecode = bytecode
        signal.signal(signal.SIGXFSZ, handler)
