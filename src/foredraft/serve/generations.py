"""Generations: requests that the engine's thread works on, seen from the event loop; and the model that they
are of.

A generation keeps what its reader has not taken, and pauses where that is too much. A reader that takes
nothing for too long is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread

from foredraft.decode.prefix_cache import PrefixCache
from foredraft.llm import LLM
from foredraft.llm.output import Piece
from foredraft.llm.service import RequestHandle, Service, StreamEvent
from foredraft.serve.limits import Limits, Permit
from foredraft.serve.logs import current
from foredraft.serve.metrics import Metrics
from foredraft.serve.offload import COMPILING, Turns, compiled, has_patterns
from foredraft.serve.problems import Problem
from foredraft.serve.requests import Job
from foredraft.serve.scored_text import TokenTexts
from foredraft.serve.settings import Settings


class Generation:
    """One request: `n` samples of each of its prompts."""

    def __init__(self, job: Job, permit: Permit, metrics: Metrics, service: Service, max_unread: int) -> None:
        self.job = job  # the request
        self.handles: list[RequestHandle] = []  # of its prompts
        self.left = job.samples  # samples that have not finished
        self.ended = self.dropped = False  # its reader is done with it
        # monotonic clock: since when its reader is busy with what it took; None while it waits
        self.busy_since: float | None = None
        self.reader: asyncio.Task[Any] | None = None  # the task that reads
        self._permit, self._metrics, self._service, self._record = permit, metrics, service, current()
        self._news: dict[int, list[Piece]] = {}  # by sample
        self._has_news = asyncio.Event()
        self._unread, self._max_unread = 0, max_unread * job.samples  # tokens
        self._paused = False
        self._read_prompts: set[int] = set()
        self._problem: Problem | None = None

    def submit(self) -> None:
        """Hand the prompts to the engine's thread; those of a generation that has ended are cancelled."""
        for place, prompt in enumerate(self.job.prompts):
            asked = replace(self.job.one, prompt=prompt)
            handle = self._service.submit(asked, owner=(self, place * asked.n))
            self.handles.append(handle)
            if self.ended:
                self._service.cancel(handle)

    def cancel(self) -> None:
        for handle in self.handles:
            self._service.cancel(handle)

    def put(self, handle: RequestHandle, sample: int, piece: Piece) -> None:
        """Take a piece of a sample, and note in the record and the metrics what it tells."""
        record, metrics, output = self._record, self._metrics, piece.output
        record.tokens += len(piece.token_ids)
        was_read = piece.token_ids or (output is not None and output.finish_reason == "length")
        if was_read and (prompt := sample // self.job.one.n) not in self._read_prompts:
            self._read_prompts.add(prompt)
            record.prompt_tokens += handle.prompt_tokens
            metrics.count("prompt_tokens", handle.prompt_tokens)
        if piece.token_ids and record.first_token is None:
            record.first_token = time.monotonic()
            metrics.by_name["time_to_first_token_seconds"].observe(record.first_token - record.started)
        if output is not None:
            metrics.finished(output)
            record.finished(output)
            self.left -= 1
            if not self.left:
                self._permit.free()
        self._news.setdefault(sample, []).append(piece)
        self._unread += len(piece.token_ids)
        if self._unread > self._max_unread and not self._paused and self.left:
            self._paused = True
            for each in self.handles:
                self._service.pause(each)
        self._has_news.set()

    def note(self, reason: str) -> None:
        self._record.reason = self._record.reason or reason

    def fail(self, problem: Problem) -> None:
        self.note(str(problem.code))
        self._problem = problem
        self._has_news.set()

    async def pieces(self, heartbeat: float | None = None) -> AsyncIterator[dict[int, list[Piece]]]:
        """Yield what has come since the last time, as the pieces of each sample; nothing is a heartbeat."""
        unread = self.job.samples
        while unread:
            self.busy_since = None
            try:
                await asyncio.wait_for(self._has_news.wait(), heartbeat)
            except TimeoutError:
                self.busy_since = time.monotonic()
                yield {}
                continue
            self._has_news.clear()
            if self._problem is not None:
                raise self._problem
            taken, self._news, self._unread = self._news, {}, 0
            if self._paused:
                self._paused = False
                for handle in self.handles:
                    self._service.resume(handle)
            unread -= sum(pieces[-1].output is not None for pieces in taken.values())
            self.busy_since = time.monotonic()  # to the end, if this was the last part
            if taken:
                yield taken


class Model:
    """A loaded model as the app serves it; it starts and ends generations."""

    def __init__(
        self, llm: LLM, settings: Settings, metrics: Metrics, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.llm, self._metrics, self._settings, self.loop = llm, metrics, settings, loop
        engine = llm.loaded.engine
        folder = None if engine.prefix_cache is None else engine.prefix_cache.folder
        if settings.prefix_cache or folder is not None:
            engine.prefix_cache = PrefixCache(settings.prefix_cache << 20, folder)
        self.rows = engine.rows.capacity
        self.limits = Limits(settings, self.rows, metrics)
        path = Path(llm.model)  # that of a hub id does not exist
        self.names = (path.resolve().name if path.exists() else llm.model, llm.model)
        self.texts = TokenTexts(llm.tokenizer, llm.loaded.spec.vocab_size)
        self.live: set[Generation] = set()
        self._compilations = Turns(COMPILING)
        self.service = Service(llm, self._publish)
        rows, cache = engine.rows, engine.cache
        gauges: dict[str, Callable[[], float]] = {
            "requests_running": lambda: len(rows.sequences),
            "requests_waiting": lambda: max(0, self.limits.samples.total - len(rows.sequences)),
            "requests_paused": lambda: sum(
                each.paused_at is not None for each in [*rows.sequences, *engine.scheduler.waiting]
            ),
            "cache_usage": lambda: (
                sum(cache.lengths[: len(rows.sequences)]) / max(1, cache.rows * cache.positions)
            ),
        }
        for name, read in gauges.items():
            metrics.by_name[name].set_function(read)

    @property
    def chats(self) -> bool:
        return self.llm.tokenizer is not None and self.llm.tokenizer.chat is not None

    async def start(self, job: Job, permit: Permit) -> Generation:
        generation = Generation(job, permit, self._metrics, self.service, self._settings.max_unread)
        try:
            self.limits.take_tokens(permit, job.prompt_tokens * job.one.n)
            if has_patterns(job.one.params, self._settings.max_patterns):
                await compiled(self._compilations, generation.submit)
            else:
                await anyio.to_thread.run_sync(generation.submit)
        except BaseException:
            # A cancelled wait leaves the thread at work: what it submits from now on, it cancels itself.
            generation.ended = True
            generation.cancel()
            raise
        self.live.add(generation)
        return generation

    def end(self, generation: Generation) -> None:
        """End a generation that its reader is done with, whether it has finished or not."""
        self.live.discard(generation)
        if generation.left and not generation.ended:
            self._metrics.count("requests_cancelled")
            generation.note("cancelled")
            generation.cancel()
        generation.ended = True

    @contextmanager
    def read(self, generation: Generation) -> Iterator[None]:
        """Let this task be the reader of a generation that has none; the generation ends with the block."""
        generation.reader = generation.reader or asyncio.current_task()
        try:
            yield
        finally:
            self.end(generation)

    def drop_slow_readers(self) -> None:
        """End the streams whose readers have taken nothing for too long."""
        now = time.monotonic()
        for generation in list(self.live):
            since, slow = generation.busy_since, self._settings.slow_reader_seconds
            if since is None or now - since <= slow or generation.reader is None or generation.dropped:
                continue
            generation.dropped = True
            self._metrics.refused("slow reader")
            generation.note("slow reader")
            generation.reader.cancel()

    def _publish(self, events: list[StreamEvent]) -> None:
        """Hand the events of a step to the event loop. The engine's thread calls it."""

        def deliver() -> None:
            for handle, sample, piece in events:
                generation, first = handle.owner
                generation.put(handle, first + sample, piece)

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver)
