"""Beside the event loop: what takes long for a large request runs in a thread, a few at a time.

Parsing and checking hold the interpreter for one call each. Collections of garbage would make such a call
many times as long, because each list that it makes may start one over all objects of the process.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from foredraft.model.freed import release_freed

__all__ = ["LARGE", "beside", "in_thread", "tidy_up", "without_collection"]

LARGE = 64 << 10  # bytes; below, a thread costs more than the work
# Large requests: each further thread would make the event loop wait longer for its turn, and tokenising takes
# 110 bytes for each of a text.
AT_ONCE = 2
T = TypeVar("T")


async def beside(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, which runs in a thread if a request of `size` bytes is large.

    Cancelling is as in `in_thread`.
    """
    return function(*args) if size <= LARGE else await in_thread(size, function, *args)


async def in_thread(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, which runs in a thread; those of large requests take turns.

    Cancelling drops work that waits for its turn. Work that has begun ends by itself and keeps its turn until
    then, so that clients that leave cannot make more work than those that stay.
    """
    if size <= LARGE:
        return await anyio.to_thread.run_sync(function, *args)
    large = _Large.of_loop()
    await large.turns.acquire()
    working = asyncio.create_task(anyio.to_thread.run_sync(function, *args))
    working.add_done_callback(lambda _: large.end())
    return await asyncio.shield(working)


async def tidy_up(*, after: bool = False) -> None:
    """Give free memory back to the system, if work of a large request has ended since the last time.

    Args:
        after: A large request has ended, too.
    """
    large = _Large.of_loop()
    if large.untidy or after:
        large.untidy = False
        # by a limiter of its own, which no other work can fill
        await anyio.to_thread.run_sync(release_freed, limiter=anyio.CapacityLimiter(1))


class _Large:
    """The work of the large requests of an event loop.

    Attributes:
        turns: Of those that work.
        untidy: Some work has ended, and its memory may be free.
    """

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.untidy = False

    @classmethod
    def of_loop(cls) -> _Large:
        """Return that of the running event loop."""
        try:
            return _large.get()
        except LookupError:
            _large.set(large := cls())
            return large

    def end(self) -> None:
        """End the work of one."""
        self.turns.release()
        self.untidy = True


_large: RunVar[_Large] = RunVar("foredraft-large-requests")


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
