"""Offload: what takes long for a request runs in threads beside the event loop, a few at a time, compilations
in their own.

Parsing and checking hold the interpreter for one call each, which collections of garbage would make many
times as long. A compilation may take seconds and cannot be broken off, so some forty of them would stop the
server: they wait in a queue, and a request gives up after a while.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

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
T = TypeVar("T")


async def offloaded(size: int, function: Callable[..., T], *args: object) -> T:
    """Return what a function returns, in a thread if a request of `size` bytes is large; as `in_thread`."""
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
    large = _Large.of_loop()
    if large.untidy or after:
        large.untidy = False
        # by a limiter of its own, which no other work can fill
        await anyio.to_thread.run_sync(release_freed, limiter=anyio.CapacityLimiter(1))


class _Large:
    """The work of the large requests of an event loop."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(AT_ONCE)  # of those that work
        self.untidy = False  # some work has ended, and its memory may be free

    @classmethod
    def of_loop(cls) -> _Large:
        try:
            return _large.get()
        except LookupError:
            _large.set(large := cls())
            return large

    def end(self) -> None:
        self.turns.release()
        self.untidy = True


_large: RunVar[_Large] = RunVar("foredraft-large-requests")


@contextmanager
def without_collection() -> Iterator[None]:
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


THREADS = 2  # llguidance leaves the interpreter to others while it works; automata of bans do not
WAITING = 64  # compilations that wait or run; most take a millisecond
SECONDS = 30.0  # that a request waits for its own

Work: TypeAlias = Callable[[], None]


class Compilations:
    """Runs compilations in daemon threads, for which the end of the process does not wait."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Future[None]]] = queue.SimpleQueue()
        self._threads = 0
        self.waiting = 0

    async def run(self, work: Work) -> None:
        if self.waiting >= WAITING:
            raise busy(f"{self.waiting} requests wait until their constraints are compiled")
        if self._threads < min(THREADS, self.waiting + 1):
            self._threads += 1
            threading.Thread(target=self._serve, name="foredraft-compile", daemon=True).start()
        self.waiting += 1
        loop, done = asyncio.get_running_loop(), Future[None]()
        done.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._leave))
        self._queue.put((work, done))
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), SECONDS)
        except TimeoutError:
            raise busy(f"the constraints were not compiled within {SECONDS:.0f} s") from None

    def _leave(self) -> None:
        self.waiting -= 1

    def _serve(self) -> None:
        while True:
            work, done = self._queue.get()
            if done.set_running_or_notify_cancel():
                try:
                    work()
                except Exception as error:
                    done.set_exception(error)
                except BaseException as panic:  # of a library in Rust; the event loop must not see it
                    done.set_exception(Problem(500, f"a compilation failed: {type(panic).__name__}: {panic}"))
                else:
                    done.set_result(None)
            del work, done  # what it compiled is the request's own


def has_patterns(params: SamplingParams) -> bool:
    return bool(params.stop or params.ban or params.text_grammar)


def check_patterns(params: SamplingParams, most: int) -> None:
    """Check how long all that a request has to compile is, in bytes of UTF-8: it takes 350 bytes a byte."""
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
