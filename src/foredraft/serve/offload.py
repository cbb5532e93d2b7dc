"""Offload: what takes long for a request runs in threads beside the event loop, a few at a time.

Parsing and checking hold the interpreter for one call each, which collections of garbage would make many
times as long. A compilation may take seconds and cannot be broken off, so some forty of them would stop the
server: they wait in a queue, and a request gives up after a while.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from foredraft.decode.params import SamplingParams
from foredraft.model.memory import release_freed
from foredraft.serve.problems import FIELDS, Problem, busy

LARGE = 64 << 10  # bytes; below, a thread costs more than the work
# Large requests: each further thread would make the event loop wait longer for its turn, and tokenising takes
# 110 bytes for each of a text.
AT_ONCE = 2
COMPILING = 2  # llguidance leaves the interpreter to others while it works; automata of bans do not
WAITING = 64  # compilations that wait or run; most take a millisecond
SECONDS = 30.0  # that a request waits for its own
T = TypeVar("T")


class Turns:
    """Work in threads that takes turns.

    Cancelling drops work that waits for its turn. Work that has begun ends by itself and keeps its turn until
    then, so that clients that leave cannot make more work than those that stay.
    """

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self.held = 0  # how many wait or run
        self.untidy = False  # some work has ended, and its memory may be free

    async def run(self, function: Callable[..., T], *args: object) -> T:
        self.held += 1
        try:
            await self._free.acquire()
        except BaseException:
            self.held -= 1
            raise
        working = asyncio.create_task(anyio.to_thread.run_sync(function, *args))
        working.add_done_callback(self._end)
        return await asyncio.shield(working)

    def _end(self, working: asyncio.Task[Any]) -> None:
        if not working.cancelled():
            working.exception()  # of work whose client has left, too, so that asyncio logs none
        self.held -= 1
        self.untidy = True
        self._free.release()


_large: RunVar[Turns] = RunVar("foredraft-large-requests")


def _large_turns() -> Turns:
    """Return the turns of the large requests of this event loop."""
    try:
        return _large.get()
    except LookupError:
        _large.set(turns := Turns(AT_ONCE))
        return turns


async def offloaded(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, in a thread if a request of `size` bytes is large; as `in_thread`."""
    return function(*args) if size <= LARGE else await in_thread(size, function, *args)


async def in_thread(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, which runs in a thread; those of large requests take turns."""
    if size <= LARGE:
        return await anyio.to_thread.run_sync(function, *args)
    return await _large_turns().run(function, *args)


async def tidy_up(*, after: bool = False) -> None:
    if (turns := _large_turns()).untidy or after:
        turns.untidy = False
        # by a limiter of its own, which no other work can fill
        await anyio.to_thread.run_sync(release_freed, limiter=anyio.CapacityLimiter(1))


async def compiled(turns: Turns, work: Callable[[], None]) -> None:
    """Do work that compiles; raise Problem if too much other waits, or if it takes too long."""
    if turns.held >= WAITING:
        raise busy(f"{turns.held} requests wait until their constraints are compiled")

    def guarded() -> None:
        try:
            work()
        except Exception:
            raise
        except BaseException as panic:  # of a library in Rust; the event loop must not see it
            raise Problem(500, f"a compilation failed: {type(panic).__name__}: {panic}") from None

    try:
        async with asyncio.timeout(SECONDS):
            await turns.run(guarded)
    except TimeoutError:
        raise busy(f"the constraints were not compiled within {SECONDS:.0f} s") from None


def has_patterns(params: SamplingParams, most: int) -> bool:
    """Return whether a request has something to compile; raise Problem for more than so many bytes of it.

    A byte of UTF-8 takes 350 bytes.
    """
    sizes = {name: sum(len(text.encode()) for text in getattr(params, name)) for name in ("stop", "ban")}
    if params.text_grammar is not None:
        option, text = params.text_grammar
        sizes[option] = len(text.encode())
    if sum(sizes.values()) > most:
        longest, names = max(sizes, key=sizes.__getitem__), [name for name, size in sizes.items() if size]
        raise Problem(
            400,
            f"{' and '.join(names)}: {sum(sizes.values())} bytes, of {most} at most (--max-patterns)",
            param=FIELDS.get(longest, longest),
        )
    return bool(params.stop or params.ban or params.text_grammar)


@contextmanager
def without_collection() -> Iterator[None]:
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
