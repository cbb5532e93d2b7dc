"""Compilations: what requests constrain their texts by is compiled by a few threads of its own.

A compilation may take seconds, and cannot be broken off. In the threads that answer everything else, some
forty of them would stop the server. Here the others wait in a queue, and a request gives up after a while.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from foredraft.decode.params import SamplingParams
from foredraft.serve.problems import FIELDS, Problem, busy

__all__ = ["Compilations", "check_patterns", "has_patterns"]

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
        """Run `work` in a thread, once one is free.

        Raises:
            Problem: Too many wait, or it took too long; it may still run then.
        """
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
    """Return whether a request has anything to compile."""
    return bool(params.stop or params.ban or params.text_grammar)


def check_patterns(params: SamplingParams, most: int) -> None:
    """Check how long all that a request has to compile is, in bytes of UTF-8: it takes 350 bytes a byte.

    Raises:
        Problem: It is longer than `most`.
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
