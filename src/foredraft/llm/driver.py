"""Driver: steps one engine on behalf of several threads.

A thread that waits for its request steps the engine if no other thread does; otherwise it waits for the
thread that does. Each step serves the requests of all threads. State of requests is read between two steps
only, by the thread that took the last step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from foredraft.decode.engine import Engine
from foredraft.decode.planning import has_drafters
from foredraft.decode.sequence import Sequence, State
from foredraft.errors import RequestError
from foredraft.llm.interrupts import Interrupts
from foredraft.profiling.profile import use_profile

__all__ = ["Driver", "closed"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def closed() -> RequestError:
    """Return the error of a request to a closed model."""
    return RequestError("this LLM is closed", remedy="load the model again")


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    """A thread that waits until `poll` returns something."""

    poll: Callable[[], T | None]
    result: T | None = None
    error: Exception | None = None  # raised by `poll`; the waiting thread raises it again

    @property
    def waiting(self) -> bool:
        return self.result is None and self.error is None

    def update(self) -> None:
        if self.waiting:
            try:
                self.result = self.poll()
            except Exception as error:
                self.error = error


class Driver:
    """Steps `engine`; reports the prefill of prompts to `progress` as ("prefill", done, total) in tokens."""

    def __init__(self, engine: Engine, progress: Callable[[str, int, int], None] | None) -> None:
        self.engine, self._progress = engine, progress
        self.between_steps = threading.Condition()
        self.closed = False
        self._stepping = False
        self._inbox: list[tuple[Callable[[Sequence], None], Sequence]] = []  # calls for between two steps
        self._waiters: list[_Waiter[Any]] = []

    def post(self, call: Callable[[Sequence], None], sequences: list[Sequence]) -> None:
        """Call `call` with each sequence between two steps: now, or by the thread that steps the engine."""
        with self.between_steps:
            if self.closed:
                return  # `close` has cancelled every request
            self._inbox += [(call, sequence) for sequence in sequences]
            if not self._stepping:
                self._empty_inbox()

    def _empty_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for call, sequence in inbox:
            call(sequence)

    def submit(self, sequences: list[Sequence]) -> None:
        """Submit sequences to the engine.

        Raises:
            RequestError: The driver is closed.
        """
        with Interrupts(), self.between_steps:
            if self.closed:
                raise closed()
            self.post(self.engine.submit, sequences)

    def drive(self, poll: Callable[[], T | None]) -> T:
        """Step the engine, or wait while another thread does, until `poll` returns something.

        `poll` is called between two steps only, perhaps by another thread.
        """
        waiter = _Waiter(poll)
        with self.between_steps:
            self._waiters.append(waiter)
        try:
            with Interrupts() as interrupts:
                while True:
                    interrupts.deliver()
                    with self.between_steps:
                        while self._stepping and waiter.waiting:
                            interrupts.wait(self.between_steps)
                        if not self._stepping:
                            waiter.update()
                        if waiter.error is not None:
                            raise waiter.error
                        if waiter.result is not None:
                            return waiter.result
                        self._stepping = True
                    self._step()
        finally:
            with self.between_steps:
                self._waiters.remove(waiter)

    def _step(self) -> None:
        """Take one step, then update the waiters of all threads."""
        prefilling = None if self._progress is None else self.engine.scheduler.prefilling
        try:
            if not self.engine.rows.sequences and has_drafters(self.engine.scheduler.waiting):
                use_profile(self.engine)  # unless loading did: the default drafter may be none
            self.engine.step()
        except Exception as error:
            # The batch cannot go on (out of memory, a broken operator), so its requests fail with this error.
            if not self.engine.rows.sequences:
                raise
            logger.exception("a forward failed; the requests in its batch end with an error")
            self.engine.fail_batch(f"{type(error).__name__}: {error}")
        finally:
            with self.between_steps:
                self._stepping = False
                try:
                    self._empty_inbox()
                    for waiter in self._waiters:
                        waiter.update()
                finally:
                    self.between_steps.notify_all()
        if self._progress is not None:
            self._report_prefill(prefilling or self.engine.scheduler.prefilling, self._progress)

    def _report_prefill(self, sequence: Sequence | None, progress: Callable[[str, int, int], None]) -> None:
        if sequence is None:
            return
        total = len(sequence.prompt) - 1
        done = self.engine.cache.lengths[sequence.row] if sequence.state is State.PREFILLING else total
        progress("prefill", done, total)

    def cancel_all(self) -> None:
        """Cancel every request, including those that are posted but not yet submitted."""
        engine = self.engine
        with self.between_steps:
            posted = [sequence for _, sequence in self._inbox]
            self.post(engine.cancel, [*posted, *engine.scheduler.waiting, *engine.rows.sequences])

    def close(self) -> None:
        """Cancel every request, and refuse further ones."""
        with self.between_steps:
            self.cancel_all()
            self.closed = True
