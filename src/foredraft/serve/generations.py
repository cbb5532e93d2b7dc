"""Generations: requests that the engine's thread works on, seen from the event loop.

The engine's thread hands its news of a step over in one call; a generation keeps what its reader has not
taken. A slow reader gets larger and larger parts. Where too many tokens are unread, the generation pauses
until the reader takes them. A reader that takes nothing for too long is dropped.
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
from foredraft.llm.service import News, Service, Ticket
from foredraft.serve.clients import Share
from foredraft.serve.compilations import Compilations, check_patterns, has_patterns
from foredraft.serve.limits import Limits, Place
from foredraft.serve.metrics import Metrics
from foredraft.serve.problems import Problem
from foredraft.serve.request_records import current
from foredraft.serve.requests import Job
from foredraft.serve.settings import Settings

__all__ = ["Generation", "Generations"]


class Generation:
    """One request: `n` samples of each of its prompts.

    Args:
        job: The request.
        place: Its place among all requests.
        metrics: Counts.
        service: Runs it.
        max_unread: As in `Settings`.

    Attributes:
        job: The request.
        prompt_tokens: Tokens of all prompts as they are read.
        tickets: Of its prompts.
        left: Samples that have not finished.
        ended: Its reader is done with it.
        dropped: It ended because its reader was too slow.
        busy_since: Monotonic clock: since when its reader is busy with what it took; None while it waits.
        reader: The task that reads.
    """

    def __init__(self, job: Job, place: Place, metrics: Metrics, service: Service, max_unread: int) -> None:
        self.job = job
        self.prompt_tokens = 0
        self.tickets: list[Ticket] = []
        self.left = job.samples
        self.ended = self.dropped = False
        self.busy_since: float | None = None
        self.reader: asyncio.Task[Any] | None = None
        self._place, self._metrics, self._service = place, metrics, service
        self._record = current()
        self._news: deque[tuple[int, Piece]] = deque()
        self._has_news = asyncio.Event()
        self._unread, self._max_unread = 0, max_unread * job.samples  # tokens
        self._paused = False
        self._read_prompts: set[int] = set()
        self._problem: Problem | None = None

    def put(self, ticket: Ticket, sample: int, piece: Piece) -> None:
        """Take a piece of a sample from the engine."""
        self._count(ticket, sample, piece)
        if piece.output is not None:
            self.left -= 1
            if not self.left:
                self._place.free()
        self._news.append((sample, piece))
        self._unread += len(piece.token_ids)
        if self._unread > self._max_unread and not self._paused and self.left:
            self._paused = True
            for each in self.tickets:
                self._service.pause(each)
        self._has_news.set()

    def _count(self, ticket: Ticket, sample: int, piece: Piece) -> None:
        record, prompt = self._record, sample // self.job.n
        record.tokens += len(piece.token_ids)
        was_read = piece.token_ids or (piece.output is not None and piece.output.finish_reason == "length")
        if was_read and prompt not in self._read_prompts:
            self._read_prompts.add(prompt)
            record.prompt_tokens += ticket.prompt_tokens
            self._metrics.prompt_tokens.inc(ticket.prompt_tokens)
        if piece.token_ids and record.first_token is None:
            record.first_token = time.monotonic()
            self._metrics.first_token.observe(record.first_token - record.started)
        if piece.output is not None:
            self._metrics.finished(piece.output)
            record.finished(piece.output)

    def note(self, reason: str) -> None:
        """Note why it ends early, unless that is known."""
        self._record.reason = self._record.reason or reason

    def fail(self, problem: Problem) -> None:
        """End the reading of it with a problem."""
        self._problem = problem
        self._has_news.set()

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what has come since the last time, as a list of samples and pieces.

        Args:
            heartbeat: Yield an empty list where nothing has come for so many seconds.

        Raises:
            Problem: The generation was made to fail.
        """
        unread = self.job.samples
        while unread:
            self.busy_since = None
            try:
                await asyncio.wait_for(self._has_news.wait(), heartbeat)
            except TimeoutError:
                self.busy_since = time.monotonic()
                yield []
                continue
            self._has_news.clear()
            if self._problem is not None:
                raise self._problem
            taken = self._take()
            unread -= sum(piece.output is not None for _, piece in taken)
            self.busy_since = time.monotonic()  # to the end, if this was the last part
            if taken:
                yield taken

    def _take(self) -> list[tuple[int, Piece]]:
        taken = list(self._news)
        self._news.clear()
        self._unread = 0
        if self._paused:
            self._paused = False
            for ticket in self.tickets:
                self._service.resume(ticket)
        return taken


class Generations:
    """Starts and ends generations.

    Args:
        llm: The model.
        loop: The event loop of all callers.
        limits: Of the load.
        metrics: Counts.
        settings: Of the server.
    """

    def __init__(
        self,
        llm: LLM,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._loop, self._limits, self._metrics, self._settings = loop, limits, metrics, settings
        self._live: set[Generation] = set()
        self._compilations = Compilations()
        self._service = Service(llm, self._publish)

    async def start(self, job: Job, place: Place, share: Share) -> Generation:
        """Start a job in its place, as a part of its client's share.

        Raises:
            RequestError: The job cannot be served; its place is free then.
            Problem: The server is full, or what there is to compile is too long.
        """
        generation = Generation(job, place, self._metrics, self._service, self._settings.max_unread)
        try:
            self._limits.take_tokens(place, sum(map(len, job.prompts)) * job.n)
            if has_patterns(job.params):
                check_patterns(job.params, self._settings.max_patterns)
                await self._compilations.run(lambda: self._submit(generation, share))
            else:
                await anyio.to_thread.run_sync(self._submit, generation, share)
        except BaseException:
            # A cancelled wait leaves the thread at work: what it submits from now on, it cancels itself.
            generation.ended = True
            self._cancel_tickets(generation)
            place.free()
            raise
        self._live.add(generation)
        return generation

    def _submit(self, generation: Generation, share: Share) -> None:
        job = generation.job
        for index, prompt in enumerate(job.prompts):
            ticket = self._service.submit(
                prompt, job.params, n=job.n, truncate=job.truncate, show_special=job.show_special,
                trace=job.provenance, thinking=job.thinking, owner=(generation, index * job.n),
                client=share.client, salts=share.salts, text_salts=share.text_salts,
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
            generation.note("cancelled")
            self._cancel_tickets(generation)
        generation.ended = True

    @contextmanager
    def read(self, generation: Generation) -> Iterator[None]:
        """Let this task be the reader of a generation that has none; the generation ends with the block."""
        generation.reader = generation.reader or asyncio.current_task()
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
            since, slow = generation.busy_since, self._settings.slow_reader_seconds
            if since is None or now - since <= slow or generation.reader is None or generation.dropped:
                continue
            generation.dropped = True
            self._metrics.refused("slow reader")
            generation.note("slow reader")
            generation.reader.cancel()

    @property
    def live(self) -> int:
        """Return how many generations run, wait, or are being read."""
        return len(self._live)

    def fail_all(self, problem: Problem) -> None:
        """End all generations with a problem, which their readers report."""
        for generation in list(self._live):
            generation.note(str(problem.code))
            generation.fail(problem)

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
            generation.put(ticket, first + sample, piece)
