"""Driver: steps one engine on behalf of several threads.

A thread that waits for its request steps the engine if no other thread does; otherwise it waits for the
thread that does. Each step serves the requests of all threads. State of requests is read between two steps
only, by the thread that took the last step.

Why an interrupt, at whatever instruction it comes, leaves nothing behind: the engine and its requests change
only by the thread that has the turn, a lock that is tried and never waited for. A thread that finds the turn
taken leaves its command in the inbox, and the thread that has the turn looks into the inbox once more after
it gave the turn back; so a command that came too late for it met a free turn. In the main thread, the only
one that interrupts reach, all of this happens while they are deferred (`Interrupts`): from before a request
is submitted until it has finished, or is cancelled. Within that stretch they are delivered only between two
steps and without the turn, and a thread that waits is woken for it. Before that stretch there is nothing to
undo, and after it there is nothing left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from foredraft.decode.draft_choice import has_drafters
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence, State
from foredraft.errors import RequestError
from foredraft.forks import check_process
from foredraft.kernels import pool
from foredraft.llm.inbox import Inbox
from foredraft.llm.interrupts import Interrupts
from foredraft.profiling.profile import use_profile
from foredraft.workers import release_workers

__all__ = ["Driver", "Request", "closed"]

T = TypeVar("T")
Progress = tuple[int, int]  # tokens of a prompt: read, and in all

logger = logging.getLogger(__name__)


def closed() -> RequestError:
    """Return the error of a request to a closed model."""
    return RequestError("this LLM is closed", remedy="load the model again")


class Request:
    """Sequences that are submitted and cancelled together.

    Attributes:
        sequences: In the order in which they start.
        submitted: Whether `Driver.run` submitted them.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.submitted = False


class _Waiter(Generic[T]):
    """A thread that waits until `poll` returns something."""

    def __init__(self, poll: Callable[[], T | None]) -> None:
        self._poll = poll
        self._result: T | None = None
        self._error: Exception | None = None  # raised by `poll`; the waiting thread raises it again
        self._asleep = threading.Lock()  # free: the thread has to poll again
        self._asleep.acquire()

    def done(self) -> bool:
        return self._result is not None or self._error is not None

    def update(self) -> None:
        """Poll, and wake the thread if that gives a result."""
        if not self.done():
            try:
                self._result = self._poll()
            except Exception as error:
                self._error = error
            if self.done():
                self.wake()

    def wake(self) -> None:
        """End the wait, or the next one. A signal handler may call this at any instruction."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._asleep.release()

    def wait(self) -> None:
        self._asleep.acquire()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Driver:
    """Steps `engine`; reports the prefill of prompts to `progress` as ("prefill", done, total) in tokens."""

    def __init__(self, engine: Engine, progress: Callable[[str, int, int], None] | None) -> None:
        self.engine, self._progress = engine, progress
        self.inbox = Inbox(engine)
        self.turn = threading.Lock()  # only tried, never waited for: of the thread that may touch the engine
        self.closed = False
        self._waiters: list[_Waiter[Any]] = []
        self._process = os.getpid()

    def check_process(self) -> None:
        """Check that this process loaded the model.

        Raises:
            RequestError: It was forked from the process that did.
        """
        check_process(self._process)

    def run(self, request: Request, poll: Callable[[], T | None], *, owner: object | None = None) -> T:
        """Submit a request unless it was before, and step the engine until `poll` returns something.

        Whatever is raised, an interrupt or an error of `poll`, cancels the request.

        Args:
            request: What `poll` waits for.
            poll: Called between two steps only, perhaps by another thread; None means "not yet".
            owner: The object with which the request ends, where it outlives this call.

        Raises:
            RequestError: The driver is closed, or the process was forked from the one that loaded the model.
        """
        self.check_process()
        if self.closed and not request.submitted:
            raise closed()
        waiter = _Waiter(poll)
        with Interrupts(waiter.wake) as interrupts:
            try:
                if not request.submitted:
                    request.submitted = True
                    self.inbox.submit(request.sequences)
                    if owner is not None:
                        for sequence in request.sequences:
                            self.inbox.cancel_with(owner, sequence)
                result = self._drive(waiter, interrupts)
                if self._waiters or _finished(request):
                    release_workers()  # or they would slow down the thread that steps next
                    pool.settle()
                interrupts.deliver()
                return result
            except BaseException:
                self.cancel(request)
                raise

    def cancel(self, request: Request) -> None:
        """Cancel a request, now or after the step that runs, while interrupts are deferred.

        A copy in a forked process is left as it is: nothing runs there.
        """
        if self._process == os.getpid():
            self.inbox.cancel(request.sequences)
            self._pass_turn()

    def cancel_all(self) -> None:
        """Cancel every request, including those that are not yet submitted.

        Raises:
            RequestError: The process was forked from the one that loaded the model.
        """
        self.check_process()
        with Interrupts():
            self.inbox.cancel_all()
            self._pass_turn()

    def close(self) -> None:
        """Refuse further requests, and cancel those that there are; in a forked process nothing runs."""
        self.closed = True
        if self._process == os.getpid():
            self.cancel_all()

    def _drive(self, waiter: _Waiter[T], interrupts: Interrupts) -> T:
        """Step the engine, or wait while another thread does, until the waiter has its result."""
        self._waiters.append(waiter)
        try:
            while True:
                interrupts.deliver()
                if not self.turn.acquire(blocking=False):
                    waiter.wait()
                else:
                    self._take_turn(waiter)
                if waiter.done():
                    return waiter.result()
        finally:
            self._waiters.remove(waiter)
            self._pass_turn()

    def _take_turn(self, waiter: _Waiter[T]) -> None:
        """Take a step unless the waiter has its result already, and give the turn back."""
        progress = None
        try:
            self._serve()
            if not waiter.done():
                try:
                    progress = self._step()
                finally:
                    self._serve()
        finally:
            self.turn.release()
        if progress is not None and self._progress is not None:
            self._progress("prefill", *progress)

    def _serve(self) -> None:
        """Carry out the commands and update the waiters of all threads. Needs the turn."""
        self.inbox.carry_out()
        for waiter in list(self._waiters):
            waiter.update()

    def _pass_turn(self) -> None:
        """Carry out the commands unless a thread has the turn, then wake a thread to take the next step."""
        while self.inbox and self.turn.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self.turn.release()
        waiting = next((waiter for waiter in list(self._waiters) if not waiter.done()), None)
        if waiting is not None:
            waiting.wake()

    def _step(self) -> Progress | None:
        """Take one step; return how far the prompt is read that it worked on, if it did on one."""
        scheduler = self.engine.scheduler
        sequence = scheduler.prefilling
        try:
            if not self.engine.rows.sequences and has_drafters(scheduler.waiting):
                # unless loading did: the default drafter may be none, and a request may name the policy
                for policy in {sequence.policy for sequence in scheduler.waiting if sequence.drafters}:
                    use_profile(self.engine, policy=policy)
            self.engine.step()
        except Exception as error:
            # The batch cannot go on (out of memory, a broken operator), so its requests fail with this error.
            if not self.engine.rows.sequences:
                raise
            logger.exception("a forward failed; the requests in its batch end with an error")
            self.engine.fail_batch(f"{type(error).__name__}: {error}")
        sequence = sequence or scheduler.prefilling
        if sequence is None:
            return None
        total = len(sequence.prompt) - 1
        done = self.engine.cache.lengths[sequence.row] if sequence.state is State.PREFILLING else total
        return done, total


def _finished(request: Request) -> bool:
    return all(sequence.state is State.FINISHED for sequence in request.sequences)
