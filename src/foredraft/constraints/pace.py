"""Pace: a grammar whose masks take too long ends its request, before it holds up all others.

The library bounds a mask by the items that it makes. That bounds memory, but hardly time: an item takes 0.2
microseconds in a JSON schema of a thousand optional properties, and a thousand times that where hundreds of
rules fit in one place. A mask that has begun cannot be broken off. So another thread computes it, the library
leaves the interpreter to others meanwhile, and the caller does not wait for long. A mask that is not waited
for any longer is finished for no use, and its thread ends.

Reading a token takes no longer than the mask before it, which has tried that token.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from llguidance import LLMatcher

__all__ = ["MAX_OVERDUE", "OVERDUE", "MaskThreads", "Pace"]

# Seconds. All rows wait for a mask. Most masks take 0.02 to 3 ms; those of a schema with 1,000 optional
# properties take 4 ms on average and 80 ms at most, at a vocabulary of 262,144.
OVERDUE = 0.3  # by the clock: the longest mask
SECONDS_PER_MASK = 0.02  # of a processor: what each mask may take
PATIENCE = 0.5  # of a processor: by how much the masks of a request may exceed that together
MAX_OVERDUE = 2  # masks that run for no use, from which on no further grammar is taken

Task: TypeAlias = Callable[[], object]
# Of a task: its answer, its seconds of a processor, its error.
Answer: TypeAlias = tuple[object, float, BaseException | None]


class MaskThreads:
    """Threads that compute masks. Safe from several threads.

    Attributes:
        overdue: Masks that run for no use.
    """

    def __init__(self) -> None:
        self._idle = queue.SimpleQueue[_Thread]()
        self._lock = threading.Lock()
        self.overdue = 0

    def compute(self, matcher: LLMatcher) -> tuple[bytes, float]:
        """Return the mask of a matcher, and the seconds of a processor that it took.

        Raises:
            TimeoutError: It takes longer than `OVERDUE`. The matcher cannot be used any more.
        """
        try:
            thread = self._idle.get_nowait()
        except queue.Empty:
            thread = _Thread()
        thread.tasks.put(matcher.compute_bitmask)
        try:
            mask, seconds, error = thread.answers.get(timeout=OVERDUE)
        except queue.Empty:
            self._count(1)
            thread.tasks.put(lambda: self._count(-1))
            raise TimeoutError from None
        self._idle.put(thread)
        if error is not None:
            raise error
        assert isinstance(mask, bytes)
        return mask, seconds

    def _count(self, more: int) -> None:
        with self._lock:
            self.overdue += more


class _Thread:
    """A thread that does tasks in order until this object is garbage. The process may end before it."""

    def __init__(self) -> None:
        self.tasks = queue.SimpleQueue[Task | None]()
        self.answers = queue.SimpleQueue[Answer]()
        given = self.tasks, self.answers
        threading.Thread(target=_serve, args=given, name="foredraft-masks", daemon=True).start()

    def __del__(self) -> None:
        self.tasks.put(None)


def _serve(tasks: queue.SimpleQueue[Task | None], answers: queue.SimpleQueue[Answer]) -> None:
    while (task := tasks.get()) is not None:
        began, answer, failed = time.thread_time(), None, None
        try:
            answer = task()
        except BaseException as error:  # the caller raises it
            failed = error
        answers.put((answer, time.thread_time() - began, failed))
        del task, answer, failed  # an idle thread keeps no grammar alive


def _compute_here(matcher: LLMatcher) -> tuple[bytes, float]:
    began = time.thread_time()
    mask: bytes = matcher.compute_bitmask()
    return mask, time.thread_time() - began


class Pace:
    """The time of one request's grammar. Its samples share it, as they share the grammar's states.

    Args:
        threads: Compute the masks.
        small: The grammar is too small for a mask that lasts. Its masks are computed without another thread,
            which costs milliseconds each on a busy machine.
    """

    def __init__(self, threads: MaskThreads, *, small: bool = False) -> None:
        self._compute = _compute_here if small else threads.compute
        self._behind = 0.0  # seconds by which the masks exceed what they may take
        self._error: str | None = None

    def mask(self, matcher: LLMatcher) -> bytes:
        """Return the mask of a matcher.

        Raises:
            TimeoutError: It takes too long, or an earlier one did.
        """
        if self._error is not None:
            raise TimeoutError(self._error)
        try:
            mask, seconds = self._compute(matcher)
        except TimeoutError:
            raise self._too_slow(f"a mask took more than {OVERDUE} s") from None
        self._behind = max(0.0, self._behind - SECONDS_PER_MASK)
        self.count(seconds)
        return mask

    def count(self, seconds: float) -> None:
        """Count seconds of a processor that the grammar took.

        Raises:
            TimeoutError: It takes too long.
        """
        self._behind += seconds
        if self._behind > PATIENCE:
            raise self._too_slow(
                f"its masks took {self._behind:.1f} s of a processor more than"
                f" {SECONDS_PER_MASK * 1000:.0f} ms each"
            )

    def _too_slow(self, measured: str) -> TimeoutError:
        self._error = f"is too slow for this machine: {measured}"
        return TimeoutError(self._error)
