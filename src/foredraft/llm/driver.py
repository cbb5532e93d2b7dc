"""Driver: steps one engine on behalf of several threads, with interrupts deferred while state changes.

A thread that waits for its request steps the engine if no other thread does, for the requests of all.

An interrupt leaves nothing behind: the engine changes only by the thread that has the turn, a lock that is
tried and never waited for. A thread that finds the turn taken leaves its command in the inbox, into which the
other looks once more after it gave the turn back. In the main thread interrupts are deferred (`Interrupts`)
from before a request is submitted until it has finished or is cancelled, and delivered only between two
steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from foredraft.decode.draft_choice import has_drafters
from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence, State
from foredraft.errors import RequestError
from foredraft.kernels import pool
from foredraft.profiling.profile import use_profile
from foredraft.workers import check_process, release_workers

logger = logging.getLogger(__name__)


class Interrupts:
    """Context in which SIGINT, which only the main thread receives, is deferred, except in `deliver`."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self.wake, self.process = wake, os.getpid()
        self.deferred: tuple[int, FrameType | None] | None = None
        self.previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self.previous = previous
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
        self.deliver()

    def deliver(self) -> None:
        """Pass a deferred signal on."""
        while self.deferred is not None and self.previous is not None:
            deferred, self.deferred = self.deferred, None
            self.previous(*deferred)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.process != os.getpid() and self.previous is not None:
            self.previous(number, frame)  # another thread forked this process; the call goes on in its parent
            return
        self.deferred = number, frame
        if self.wake is not None:
            self.wake()


# A call for each of some sequences, which are listed when the call is due.
Command = tuple[Callable[[], list[Sequence]], Callable[[Sequence], None]]


class Inbox:
    """Commands of all threads: sequences to submit, to pause and to cancel. A method only leaves its command.

    A command is one append to a deque, atomic and without a lock, so it may come from any thread, from a
    signal handler and from the garbage collector. A sequence that is cancelled before it is submitted never
    starts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: deque[Command | _Dropped] = deque()
        self._watched: set[_Dropped] = set()  # keeps the references alive until their owners are gone

    def __bool__(self) -> bool:
        return bool(self._commands)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences."""
        self._commands.append((lambda: sequences, self._engine.submit))

    def cancel(self, sequences: list[Sequence]) -> None:
        """End sequences; those that have ended, or were never submitted, are left as they are."""
        # last first: otherwise the row of a cancelled sequence would pass to a waiting choice of its prompt
        self._commands.append((lambda: sequences[::-1], self._engine.cancel))

    def pause(self, sequences: list[Sequence]) -> None:
        """Leave sequences out of the rounds."""
        self._commands.append((lambda: sequences, self._engine.pause))

    def resume(self, sequences: list[Sequence]) -> None:
        """Let paused sequences go on."""
        self._commands.append((lambda: sequences, self._engine.resume))

    def fail(self, sequences: list[Sequence], error: str) -> None:
        """End sequences with an error; those that have ended are left as they are."""
        self._commands.append((lambda: sequences, lambda each: self._engine.fail(each, error)))

    def cancel_all(self) -> None:
        """End every sequence that is running or waiting, or whose submission is in the inbox by now."""
        self._commands.append((self._all, self._engine.cancel))

    def cancel_with(self, owner: object, sequence: Sequence) -> None:
        """End a sequence as soon as its owner is garbage: by the deque's `append`, which runs no Python."""
        dropped = _Dropped(owner, self._commands.append)
        dropped.sequence = sequence
        self._watched.add(dropped)

    def carry_out(self) -> None:
        """Carry all commands out. A sequence for which that fails ends with an error; the others go on."""
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _Dropped):
                self._watched.discard(command)
                self._apply(self._engine.cancel, command.sequence)
                continue
            sequences, call = command
            for sequence in sequences():
                self._apply(call, sequence)

    def _all(self) -> list[Sequence]:
        return [*self._engine.scheduler.waiting, *self._engine.rows.sequences]

    def _apply(self, call: Callable[[Sequence], None], sequence: Sequence) -> None:
        try:
            call(sequence)
        except Exception as error:
            logger.exception("a request cannot be submitted or cancelled; it ends with an error")
            self._engine.fail(sequence, f"{type(error).__name__}: {error}")


class _Dropped(weakref.ref[Any]):
    """A reference to the owner of a sequence; once the owner is garbage, the command to cancel it."""

    __slots__ = ("sequence",)
    sequence: Sequence


T = TypeVar("T")
Progress = tuple[int, int]  # tokens of a prompt: read, and in all


def closed() -> RequestError:
    """Return the error of a request to a closed model."""
    return RequestError("this LLM is closed", remedy="load the model again")


class Request:
    """Sequences that are submitted and cancelled together."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences  # in the order in which they start
        self.submitted = False  # whether `Driver.run` submitted them


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
        """Check that this process loaded the model."""
        check_process(self._process)

    def run(self, request: Request, poll: Callable[[], T | None], *, owner: object | None = None) -> T:
        """Submit a request once, and step until `poll` returns something; an error cancels it."""
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
        """Cancel a request, now or after the step that runs; in a forked process nothing runs."""
        if self._process == os.getpid():
            self.inbox.cancel(request.sequences)
            self._pass_turn()

    def cancel_all(self) -> None:
        """Cancel every request, including those that are not yet submitted."""
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
