"""The engine's thread, which alone steps an engine, while requests want tokens; and `Service`, for servers.

A command comes from any thread, from a signal handler or from the garbage collector: it is one `put` into a
queue, and is carried out between two steps. A caller only waits for its news, so an interrupt reaches it at
once, and cancels its request. So does the end of the request's owner, as garbage. While no request wants a
token the thread refers to no engine, so a model that is dropped frees its memory, and after a while it ends.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from foredraft.decode.engine import Engine
from foredraft.decode.sequence import Sequence, State
from foredraft.decode.stats import Stats
from foredraft.errors import RequestError
from foredraft.kernels import pool
from foredraft.llm.output import AHEAD, Output, Piece, Report, Request, TextStreamer, message_of
from foredraft.llm.requests import Submission
from foredraft.profiling.profile import use_profile
from foredraft.workers import check_process, release_workers

if TYPE_CHECKING:
    from foredraft.llm import LLM

logger = logging.getLogger(__name__)

NAME = "foredraft-engine"
NAP = 0.001  # seconds between two looks whether the thread has ended
LINGER = 1.0  # seconds that an idle thread waits for a command before it ends
Command: TypeAlias = Callable[[], object]


def closed() -> RequestError:
    """Return the error of a request to a closed model."""
    return RequestError("this LLM is closed", remedy="load the model again")


def _go_on() -> None:
    """Do nothing: as a command it wakes the thread, for which a reader has made room."""


class _Owner(weakref.ref[Any]):
    """A reference to the owner of a request; once the owner is garbage, the command to cancel it."""

    cancel: Command = staticmethod(_go_on)  # until it is set, nothing was submitted

    def __call__(self) -> None:
        self.cancel()


class _Call:
    """The owner of a request, for the time of one call."""


class _Line:
    """The commands of a thread, and whether it serves them; no engine is reached from here."""

    def __init__(self) -> None:
        self.queue = SimpleQueue[Command]()
        self.serving = threading.Lock()  # held by the thread that works; another one ends at once
        self.ended = False  # the thread ends as soon as it is idle
        self._first: Command | None = None

    def wait(self) -> bool:
        """Return whether a command comes before the thread is to end."""
        with suppress(Empty):
            self._first = self.queue.get(timeout=LINGER)
        return self._first is not None

    def carry_out(self) -> bool:
        """Carry out a command, to which nothing refers afterwards; return whether there was one."""
        command, self._first = self._first, None
        try:
            command = command or self.queue.get_nowait()
        except Empty:
            return False
        command()
        return True


_THREADS = weakref.WeakSet["EngineThread"]()


class EngineThread:
    """Steps `engine`; `progress` gets ("prefill", done, total) in tokens of a prompt that is read."""

    def __init__(self, engine: Engine, progress: Report | None) -> None:
        self.engine, self._progress = engine, progress
        self.closed = False
        self.failed = False  # a defect broke off what it was about
        self.after_step: set[Callable[[], None]] = set()  # called when all requests have shown their news
        self._line = _Line()
        self._requests: list[Request] = []  # that are not over; the thread's own
        self._ident: int | None = None  # of the thread, while it works
        self._process = os.getpid()
        _THREADS.add(self)

    @property
    def alive(self) -> bool:
        # not `Thread.is_alive`: an interrupt there would end the thread for Python
        return self._line.serving.locked()

    def check_process(self) -> None:
        """Check that this process loaded the model."""
        check_process(self._process)

    def start(self) -> None:
        """Start the thread unless it lives; it ends by itself."""
        if not self.alive:
            given = self._line, weakref.ref(self)
            threading.Thread(target=_serve, args=given, name=NAME, daemon=True).start()

    def submit(self, request: Request, owner: object = None) -> None:
        """Start a request, which is cancelled once its owner is garbage."""
        self.check_process()
        if self.closed:
            raise closed()
        if owner is not None:
            request.watch = watch = _Owner(owner, self._line.queue.put)
            watch.cancel = partial(self._each, request.sequences[::-1], self.engine.cancel)
        release_workers()  # this thread's, or they would slow down the engine's
        self._line.queue.put(partial(self._take_up, request))
        self.start()

    def run(self, request: Request) -> Any:
        """Submit a request and return its result; an error and an interrupt cancel it."""
        call = _Call()  # for an interrupt that comes while another one is handled
        try:
            self.submit(request, call)
            return self.wait(request)
        except BaseException:
            self.cancel(request)
            raise

    def wait(self, request: Request) -> Any:
        """Return the next result of a request, or raise its error; report progress meanwhile."""
        self.check_process()
        while True:
            news = request.news.get()
            if request.news.qsize() == AHEAD - 1:
                self._line.queue.put(_go_on)
                self.start()
            if isinstance(news, BaseException):
                raise _copied(news)
            if not isinstance(news, partial):
                return news
            news()

    def cancel(self, request: Request) -> None:
        """End a request after the step that runs. It may be over, or never have been submitted."""
        # last first: otherwise the row of a cancelled sequence would pass to a waiting choice of its prompt
        self.tell(self.engine.cancel, request.sequences[::-1])

    def tell(self, method: Callable[[Sequence], None], sequences: list[Sequence]) -> None:
        """Call a method of the engine for each sequence after the step that runs; not in a forked process."""
        if self._process == os.getpid():
            self._line.queue.put(partial(self._each, sequences, method))
            self._wake()

    def cancel_all(self) -> None:
        """Cancel every request that was submitted so far; a signal handler may call this."""
        self.check_process()
        self._line.queue.put(self._cancel_all)

    def stop(self) -> None:
        """Cancel every request, and wait for the thread's end unless this is it; not in a forked process."""
        if self._process != os.getpid():
            return
        self._line.queue.put(self._cancel_all)
        self._line.ended = True
        self._line.queue.put(_go_on)
        if self._requests:
            self._wake()
        while self.alive and not self.within:
            time.sleep(NAP)

    @property
    def within(self) -> bool:
        """Whether the caller runs in the engine's thread."""
        return self._ident == threading.get_ident()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the interpreter is ending
            self.start()

    def work(self) -> None:
        """Carry out commands, and step the engine until no request wants a step."""
        self._ident = threading.get_ident()
        try:
            while True:
                while self._line.carry_out():
                    pass
                self._show()
                if self._line.queue.empty():
                    if self.engine.scheduler.stalled or not any(each.wants for each in self._requests):
                        return
                    self._step()
        except BaseException as error:
            logger.exception("the engine's thread failed; its requests end with an error")
            self.failed = True
            broken, self._requests = self._requests, []
            for each in broken:
                each.news.put(error)
        finally:
            self._ident = None

    def _show(self) -> None:
        before = len(self._requests)
        self._requests = [each for each in self._requests if not self._has_shown_all(each)]
        for call in tuple(self.after_step):
            call()
        if before and not self._requests:
            release_workers()
            pool.settle()

    def _has_shown_all(self, request: Request) -> bool:
        try:
            return request.show()
        except BaseException as error:
            return request.fail(self.engine, error)

    def _take_up(self, request: Request) -> None:
        self._requests.append(request)
        self._each(request.sequences, self.engine.cancel if self.closed else self.engine.submit)

    def _cancel_all(self) -> None:
        self._each([*self.engine.scheduler.waiting, *self.engine.rows.sequences], self.engine.cancel)

    def _each(self, sequences: list[Sequence], method: Callable[[Sequence], None]) -> None:
        """Call a method of the engine for sequences; one for which that fails ends with an error."""
        for sequence in sequences:
            try:
                method(sequence)
            except Exception as error:
                logger.exception("a request cannot be submitted or cancelled; it ends with an error")
                self.engine.fail(sequence, message_of(error))

    def _step(self) -> None:
        """Take a step; a failure of one that has no request to blame is every request's error."""
        scheduler = self.engine.scheduler
        sequence = scheduler.prefilling
        try:
            try:
                self._profile()
                self.engine.step()
            except Exception as error:
                # The batch cannot go on (out of memory, a broken operator), so its requests fail with this.
                if not self.engine.rows.sequences:
                    raise
                logger.exception("a forward failed; the requests in its batch end with an error")
                self.engine.fail_batch(message_of(error))
            if self._progress is not None and (sequence := sequence or scheduler.prefilling) is not None:
                self._report(sequence, self._progress)
        except BaseException as error:
            if self.after_step:
                logger.exception("the engine failed; all requests end with an error")
            self._requests = [each for each in self._requests if not each.fail(self.engine, error)]

    def _profile(self) -> None:
        """Measure costs unless loading did: the default drafter may be none, and requests name policies."""
        if self.engine.rows.sequences:
            return
        for policy in {each.policy for each in self.engine.scheduler.waiting if each.drafters}:
            use_profile(self.engine, policy=policy)

    def _report(self, sequence: Sequence, progress: Report) -> None:
        done = total = len(sequence.prompt) - 1
        if sequence.state is State.PREFILLING:
            done = self.engine.cache.lengths[sequence.row]
        owns = (each for each in self._requests if any(own is sequence for own in each.sequences))
        if (request := next(owns, None)) is not None:
            request.report(progress, done, total)


def _serve(line: _Line, of: weakref.ref[EngineThread]) -> None:
    """Work on commands until none comes for a while; between them refer to no engine."""
    while line.serving.acquire(blocking=False):
        try:
            while (thread := of()) is not None:
                thread.work()
                del thread
                if line.ended or not line.wait():
                    break
        finally:
            line.serving.release()
        if line.queue.empty() or of() is None:
            return


def _copied(error: BaseException) -> BaseException:
    """Return a copy, so that each caller has a traceback of its own; the error where it cannot be copied."""
    try:
        made = copy.copy(error)
    except Exception:
        return error
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


@atexit.register
def _stop_threads() -> None:
    for thread in list(_THREADS):
        if thread.alive:
            thread.stop()


class RequestHandle(Request):
    """A request of a service."""

    def __init__(self, service: Service, pieces: list[TextStreamer], owner: Any) -> None:
        super().__init__([each.sequence for each in pieces])
        self.service, self.pieces, self.owner = service, pieces, owner

    @property
    def prompt(self) -> list[int]:
        """The ids of the prompt as it is read."""
        return self.sequences[0].prompt

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as it is read."""
        return len(self.prompt)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not read, once its first sample has a token; 0 before that."""
        return self.sequences[0].cached

    @property
    def over(self) -> bool:
        """Whether the last piece of every sample was given."""
        return all(pieces.over for pieces in self.pieces)

    def show(self) -> bool:
        for sample, pieces in enumerate(self.pieces):
            try:
                piece = pieces.next()
            except Exception as error:  # a defect there ends that sample, and no other
                logger.exception("the text of a request cannot be shown; it ends with an error")
                sequence, pieces.over = pieces.sequence, True
                self.service.thread.tell(self.service.thread.engine.cancel, [sequence])
                output = Output(
                    text=None, token_ids=[], origins=[], finish_reason="error", seed=sequence.seed,
                    sample=sequence.sample, prompt_tokens=len(sequence.prompt), stats=Stats(),
                    error=message_of(error),
                )  # fmt: skip
                piece = Piece(None, [], [], output=output)
            if piece is not None:
                self.service.events.append(StreamEvent(self, sample, piece))
        return self.over

    def report(self, progress: Report, done: int, total: int) -> None:
        progress("prefill", done, total)

    def fail(self, engine: Engine, error: BaseException) -> bool:
        super().fail(engine, error)
        return False


class StreamEvent(NamedTuple):
    """A piece of one sample of a request."""

    handle: RequestHandle
    sample: int
    piece: Piece


class Service:
    """Requests of a program that must not wait for them: after each step, `publish` gets what all show."""

    def __init__(self, llm: LLM, publish: Callable[[list[StreamEvent]], None]) -> None:
        self._llm, self._publish = llm, publish
        self.thread = llm._open_thread()
        self.events: list[StreamEvent] = []  # of the step that ran last
        self._open: set[RequestHandle] = set()  # whose last piece was not published
        self._stopped = False
        self.thread.after_step.add(self._publish_events)

    @property
    def alive(self) -> bool:
        """Whether requests are served, which ends by `stop`, or by a defect."""
        return not (self._stopped or self.thread.failed)

    def submit(self, asked: Submission, *, owner: Any = None) -> RequestHandle:
        """Start the samples of a submission; the handle has `owner`."""
        if self._stopped:
            raise closed()
        self.thread.check_process()
        requests = self._llm.requests
        sequences, output = requests.sequences(requests.encoded(asked)), requests.output
        handle = RequestHandle(self, [TextStreamer(sequence, output) for sequence in sequences], owner)
        self._open.add(handle)
        try:
            self.thread.submit(handle)
        except BaseException:
            self._open.discard(handle)
            raise
        if not self.alive:  # it was stopped meanwhile
            self.thread.cancel(handle)
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a request after the step that runs; what it has is published. It may have ended."""
        self.thread.cancel(handle)

    def pause(self, handle: RequestHandle) -> None:
        """Leave a request out of the steps after the one that runs. Its texts are the same."""
        self.thread.tell(self.thread.engine.pause, handle.sequences)

    def resume(self, handle: RequestHandle) -> None:
        """Let a paused request go on, once a row is free if another request took its row."""
        self.thread.tell(self.thread.engine.resume, handle.sequences)

    def stop(self) -> None:
        """Take no more requests, cancel all that there are, and wait until what they have is published."""
        self._stopped = True
        self.thread.cancel_all()
        self.thread.start()
        while self._open and not (self.thread.failed or self.thread.within):
            time.sleep(NAP)

    def _publish_events(self) -> None:
        events, self.events = self.events, []
        if events:
            try:
                self._publish(events)
            except Exception:
                logger.exception("the news of a step are lost")
            self._open -= {event.handle for event in events if event.handle.over}
