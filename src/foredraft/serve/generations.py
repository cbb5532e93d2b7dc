"""Generations: requests that the engine's thread works on, seen from the event loop.

The engine's thread hands its news of a step over in one call; a generation keeps what its reader has not
taken.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio.to_thread

from foredraft.llm import LLM
from foredraft.llm.output import Piece
from foredraft.llm.service import News, Service
from foredraft.serve.limits import Limits, Place
from foredraft.serve.metrics import Metrics
from foredraft.serve.requests import Job

__all__ = ["Generation", "Generations"]


class Generation:
    """One request: `n` samples of each of its prompts.

    Attributes:
        prompt_tokens: Tokens of all prompts as they are read.
        started: Time of the request's arrival, by the monotonic clock.
    """

    def __init__(self, job: Job, place: Place, metrics: Metrics) -> None:
        self.job, self.started = job, time.monotonic()
        self.prompt_tokens = 0
        self.tickets: list[Any] = []
        self.left = job.samples
        self.ended = False  # its reader is done with it
        self.stalled_since: float | None = None  # since when the reader has taken nothing
        self.reader: asyncio.Task[Any] | None = None
        self._place, self._metrics = place, metrics
        self._news: deque[tuple[int, Piece]] = deque()
        self._bell = asyncio.Event()
        self._first = True

    def put(self, sample: int, piece: Piece) -> None:
        """Take a piece from the engine."""
        if self._first and piece.token_ids:
            self._first = False
            self._metrics.first_token(time.monotonic() - self.started)
        if piece.output is not None:
            self.left -= 1
            self._metrics.finished(piece.output)
            if not self.left:
                self._place.free()
        self._news.append((sample, piece))
        if self.stalled_since is None:
            self.stalled_since = time.monotonic()
        self._bell.set()

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what has come since the last time, as a list of samples and pieces.

        Args:
            heartbeat: Yield an empty list where nothing has come for so many seconds.
        """
        unread = self.job.samples
        while unread:
            try:
                await asyncio.wait_for(self._bell.wait(), heartbeat)
            except TimeoutError:
                yield []
                continue
            self._bell.clear()
            self.stalled_since = None
            taken = list(self._news)
            self._news.clear()
            unread -= sum(piece.output is not None for _, piece in taken)
            if taken:
                yield taken


class Generations:
    """Starts and ends generations.

    Args:
        llm: The model.
        loop: The event loop of all callers.
        limits: Of the load.
        metrics: Counts.
        slow_reader_seconds: As in `Settings`.
    """

    def __init__(
        self,
        llm: LLM,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        metrics: Metrics,
        slow_reader_seconds: float,
    ) -> None:
        self._loop, self._limits, self._metrics = loop, limits, metrics
        self._slow = slow_reader_seconds
        self._live: set[Generation] = set()
        self._service = Service(llm, self._publish)

    async def start(self, job: Job, place: Place) -> Generation:
        """Start a job in its place.

        Raises:
            RequestError: The job cannot be served; its place is free then.
        """
        generation = Generation(job, place, self._metrics)
        try:
            self._limits.take_tokens(place, sum(map(len, job.prompts)) * job.n)
            await anyio.to_thread.run_sync(self._submit, generation)
        except BaseException:
            # A cancelled wait leaves the thread at work: what it submits from now on, it cancels itself.
            generation.ended = True
            self._cancel_tickets(generation)
            place.free()
            raise
        self._live.add(generation)
        return generation

    def _submit(self, generation: Generation) -> None:
        job = generation.job
        for index, prompt in enumerate(job.prompts):
            ticket = self._service.submit(
                prompt, job.params, n=job.n, truncate=job.truncate, show_special=job.show_special,
                trace=job.provenance, owner=(generation, index * job.n),
            )  # fmt: skip
            generation.tickets.append(ticket)
            generation.prompt_tokens += ticket.prompt_tokens
            if generation.ended:
                self._service.cancel(ticket)

    def end(self, generation: Generation) -> None:
        """End a generation that its reader is done with, whether it has finished or not."""
        self._live.discard(generation)
        if generation.left and not generation.ended:
            self._metrics.cancelled.inc()
            self._cancel_tickets(generation)
        generation.ended = True

    @contextmanager
    def read(self, generation: Generation) -> Iterator[None]:
        """Let this task be the reader of a generation, which ends with the block."""
        generation.reader = asyncio.current_task()
        try:
            yield
        finally:
            self.end(generation)

    def _cancel_tickets(self, generation: Generation) -> None:
        for ticket in generation.tickets:
            self._service.cancel(ticket)

    def drop_slow_readers(self) -> None:
        """End the streams whose readers have taken nothing for too long."""
        now = time.monotonic()
        for generation in list(self._live):
            since = generation.stalled_since
            if since is not None and now - since > self._slow and generation.reader is not None:
                self._metrics.refused("slow reader")
                generation.reader.cancel()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread lives."""
        return self._service.alive

    def stop(self) -> None:
        """End all generations and the engine's thread."""
        self._service.stop()

    def _publish(self, news: list[News]) -> None:
        """Hand the news of a step to the event loop. The engine's thread calls it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[News]) -> None:
        for ticket, sample, piece in news:
            generation, first = ticket.owner
            generation.put(first + sample, piece)
