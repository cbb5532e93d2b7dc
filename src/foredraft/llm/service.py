"""Service: one thread that steps the engine, for programs that must not wait for it, such as servers.

After each step it calls `publish` once, with what all requests have to show since the step before.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from foredraft.decode.sequence import Sequence
from foredraft.decode.stats import Stats
from foredraft.llm import LLM
from foredraft.llm.driver import Request, closed
from foredraft.llm.output import Output, Piece, TextStreamer
from foredraft.llm.requests import Submission

logger = logging.getLogger(__name__)


class RequestHandle:
    """A request of a service."""

    def __init__(self, pieces: list[TextStreamer], owner: Any) -> None:
        self.pieces, self.owner = pieces, owner
        self.prompt = pieces[0].sequence.prompt  # the ids of the prompt as it is read

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as it is read."""
        return len(self.prompt)

    @property
    def sequences(self) -> list[Sequence]:
        return [pieces.sequence for pieces in self.pieces]

    @property
    def over(self) -> bool:
        """Whether the last piece of every sample was given."""
        return all(pieces.over for pieces in self.pieces)


class StreamEvent(NamedTuple):
    """A piece of one sample of a request."""

    handle: RequestHandle
    sample: int
    piece: Piece


class Service:
    """Steps the engine of an LLM in a thread of its own while there are requests."""

    def __init__(self, llm: LLM, publish: Callable[[list[StreamEvent]], None]) -> None:
        self._llm, self._publish = llm, publish
        self._driver = llm._open_driver()
        self._new: deque[RequestHandle] = deque()  # from any thread; the engine's thread takes them over
        self._handles: list[RequestHandle] = []
        self._work = threading.Event()  # set: there may be something to step or to publish
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread lives; it ends by `stop`, or by a defect."""
        return self._thread.is_alive()

    def submit(self, asked: Submission, *, owner: Any = None) -> RequestHandle:
        """Start the samples of a submission; the handle has `owner`."""
        if self._stopped:
            raise closed()
        self._driver.check_process()
        requests = self._llm.requests
        sequences, output = requests.sequences(requests.encoded(asked)), requests.output
        handle = RequestHandle([TextStreamer(sequence, output) for sequence in sequences], owner)
        self._new.append(handle)
        self._driver.inbox.submit(sequences)
        self._work.set()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a request after the step that runs; what it has is published. It may have ended."""
        self._driver.inbox.cancel(handle.sequences)
        self._work.set()

    def pause(self, handle: RequestHandle) -> None:
        """Leave a request out of the steps after the one that runs. Its texts are the same."""
        self._driver.inbox.pause(handle.sequences)
        self._work.set()

    def resume(self, handle: RequestHandle) -> None:
        """Let a paused request go on, once a row is free if another request took its row."""
        self._driver.inbox.resume(handle.sequences)
        self._work.set()

    def stop(self) -> None:
        """Cancel all requests, publish what they have, and end the thread."""
        self._stopped = True
        self._driver.inbox.cancel_all()
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        idle = Request([])
        idle.submitted = True  # there is nothing to submit
        while not self._stopped or self._handles or self._new:
            self._work.wait()
            self._work.clear()
            if self._stopped:
                self._driver.inbox.cancel_all()  # a submission may have come after the first time
            try:
                self._driver.run(idle, self._publish_news)
            except Exception as error:
                logger.exception("the engine failed; all requests end with an error")
                self._fail(f"{type(error).__name__}: {error}")
                self._work.set()

    def _publish_news(self) -> bool | None:
        """Publish what there is to show; return True where nothing is left to step, else None."""
        while self._new:
            self._handles.append(self._new.popleft())
        events = []
        for handle in self._handles:
            for sample in range(len(handle.pieces)):
                if (piece := self._next(handle, sample)) is not None:
                    events.append(StreamEvent(handle, sample, piece))
        self._handles = [handle for handle in self._handles if not handle.over]
        if events:
            try:
                self._publish(events)
            except Exception:
                logger.exception("the news of a step are lost")
        if self._new or self._driver.inbox:
            return None
        return None if self._handles and not self._driver.engine.scheduler.stalled else True

    def _next(self, handle: RequestHandle, sample: int) -> Piece | None:
        """Return the next piece of a sample; a defect there ends that sample, with an error, and no other."""
        pieces = handle.pieces[sample]
        try:
            return pieces.next()
        except Exception as error:
            logger.exception("the text of a request cannot be shown; it ends with an error")
            self._driver.inbox.cancel([pieces.sequence])
            pieces.over = True
            output = _failed(pieces.sequence, f"{type(error).__name__}: {error}")
            return Piece(None, [], [], output=output)

    def _fail(self, error: str) -> None:
        """End every request with an error, after the engine broke off where no request was to blame."""
        for handle in [*self._handles, *self._new]:
            self._driver.inbox.fail(handle.sequences, error)


def _failed(sequence: Sequence, error: str) -> Output:
    """Return the output of a sequence whose text cannot be shown."""
    return Output(
        text=None, token_ids=[], origins=[], finish_reason="error", seed=sequence.seed,
        sample=sequence.sample, prompt_tokens=len(sequence.prompt), stats=Stats(), error=error,
    )  # fmt: skip
