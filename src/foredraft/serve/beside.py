"""Beside the event loop: what takes long for a large request runs in a thread, a few at a time.

Parsing and checking hold the interpreter for one call each. Collections of garbage would make such a call
many times as long, because each list that it makes may start one over all objects of the process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

__all__ = ["beside", "without_collection"]

LARGE = 64 << 10  # bytes; below, a thread costs more than the work
AT_ONCE = 2  # large requests: each further thread would make the event loop wait longer for its turn
T = TypeVar("T")
_limiter: RunVar[anyio.CapacityLimiter] = RunVar("foredraft-large-requests")


async def beside(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, which runs in a thread if a request of `size` bytes is large.

    Cancelling drops work that waits for a thread; work that has begun ends by itself.
    """
    if size <= LARGE:
        return function(*args)
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(AT_ONCE)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, *args, limiter=limiter)


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within the block."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
