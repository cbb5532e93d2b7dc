"""Generations: requests that the engine's thread works on, seen from the event loop.

A generation keeps what its reader has not taken, and pauses where that is too much. A reader that takes
nothing for too long is dropped.
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
from foredraft.llm.requests import Submission
from foredraft.llm.service import RequestHandle, Service, StreamEvent
from foredraft.serve.limits import Limits, Permit, Tenant
from foredraft.serve.logs import current
from foredraft.serve.metrics import Metrics
from foredraft.serve.offload import Compilations, check_patterns, has_patterns
from foredraft.serve.problems import Problem
from foredraft.serve.requests import Job
from foredraft.serve.settings import Settings


class Generation:
    """One request: `n` samples of each of its prompts."""

    def __init__(self, job: Job, permit: Permit, metrics: Metrics, service: Service, max_unread: int) -> None:
        self.job = job  # the request
        self.prompt_tokens = 0  # tokens of all prompts as they are read
        self.handles: list[RequestHandle] = []  # of its prompts
        self.left = job.samples  # samples that have not finished
        self.ended = self.dropped = False  # its reader is done with it
        # monotonic clock: since when its reader is busy with what it took; None while it waits
        self.busy_since: float | None = None
        self.reader: asyncio.Task[Any] | None = None  # the task that reads
        self._permit, self._metrics, self._service = permit, metrics, service
        self._record = current()
        self._news: deque[tuple[int, Piece]] = deque()
        self._has_news = asyncio.Event()
        self._unread, self._max_unread = 0, max_unread * job.samples  # tokens
        self._paused = False
        self._read_prompts: set[int] = set()
        self._problem: Problem | None = None

    def put(self, handle: RequestHandle, sample: int, piece: Piece) -> None:
        self._count(handle, sample, piece)
        if piece.output is not None:
            self.left -= 1
            if not self.left:
                self._permit.free()
        self._news.append((sample, piece))
        self._unread += len(piece.token_ids)
        if self._unread > self._max_unread and not self._paused and self.left:
            self._paused = True
            for each in self.handles:
                self._service.pause(each)
        self._has_news.set()

    def _count(self, handle: RequestHandle, sample: int, piece: Piece) -> None:
        record, prompt = self._record, sample // self.job.n
        record.tokens += len(piece.token_ids)
        was_read = piece.token_ids or (piece.output is not None and piece.output.finish_reason == "length")
        if was_read and prompt not in self._read_prompts:
            self._read_prompts.add(prompt)
            record.prompt_tokens += handle.prompt_tokens
            self._metrics.prompt_tokens.inc(handle.prompt_tokens)
        if piece.token_ids and record.first_token is None:
            record.first_token = time.monotonic()
            self._metrics.first_token.observe(record.first_token - record.started)
        if piece.output is not None:
            self._metrics.finished(piece.output)
            record.finished(piece.output)

    def note(self, reason: str) -> None:
        self._record.reason = self._record.reason or reason

    def fail(self, problem: Problem) -> None:
        self._problem = problem
        self._has_news.set()

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what has come since the last time, as a list of samples and pieces."""
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
            for handle in self.handles:
                self._service.resume(handle)
        return taken


class Generations:
    """Starts and ends generations."""

    def __init__(
        self,
        llm: LLM,  # the model
        loop: asyncio.AbstractEventLoop,  # the event loop of all callers
        limits: Limits,  # of the load
        metrics: Metrics,  # counts
        settings: Settings,  # of the server
    ) -> None:
        self._loop, self._limits, self._metrics, self._settings = loop, limits, metrics, settings
        self._live: set[Generation] = set()
        self._compilations = Compilations()
        self._service = Service(llm, self._publish)

    async def start(self, job: Job, permit: Permit, tenant: Tenant) -> Generation:
        generation = Generation(job, permit, self._metrics, self._service, self._settings.max_unread)
        try:
            self._limits.take_tokens(permit, sum(map(len, job.prompts)) * job.n)
            if has_patterns(job.params):
                check_patterns(job.params, self._settings.max_patterns)
                await self._compilations.run(lambda: self._submit(generation, tenant))
            else:
                await anyio.to_thread.run_sync(self._submit, generation, tenant)
        except BaseException:
            # A cancelled wait leaves the thread at work: what it submits from now on, it cancels itself.
            generation.ended = True
            self._cancel_handles(generation)
            permit.free()
            raise
        self._live.add(generation)
        return generation

    def _submit(self, generation: Generation, tenant: Tenant) -> None:
        job = generation.job
        for index, prompt in enumerate(job.prompts):
            asked = Submission(
                prompt, job.params, job.n, job.truncate, job.show_special, job.provenance,
                tenant.client, tenant.salts, tenant.text_salts, job.thinking,
            )  # fmt: skip
            handle = self._service.submit(asked, owner=(generation, index * job.n))
            generation.handles.append(handle)
            generation.prompt_tokens += handle.prompt_tokens
            if generation.ended:
                self._service.cancel(handle)

    def end(self, generation: Generation) -> None:
        """End a generation that its reader is done with, whether it has finished or not."""
        self._live.discard(generation)
        if generation.left and not generation.ended:
            self._metrics.cancelled.inc()
            generation.note("cancelled")
            self._cancel_handles(generation)
        generation.ended = True

    @contextmanager
    def read(self, generation: Generation) -> Iterator[None]:
        """Let this task be the reader of a generation that has none; the generation ends with the block."""
        generation.reader = generation.reader or asyncio.current_task()
        try:
            yield
        finally:
            self.end(generation)

    def _cancel_handles(self, generation: Generation) -> None:
        for handle in generation.handles:
            self._service.cancel(handle)

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
        return len(self._live)

    def fail_all(self, problem: Problem) -> None:
        for generation in list(self._live):
            generation.note(str(problem.code))
            generation.fail(problem)

    @property
    def alive(self) -> bool:
        return self._service.alive

    def stop(self) -> None:
        self._service.stop()

    def _publish(self, events: list[StreamEvent]) -> None:
        """Hand the events of a step to the event loop. The engine's thread calls it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[StreamEvent]) -> None:
        for handle, sample, piece in events:
            generation, first = handle.owner
            generation.put(handle, first + sample, piece)
