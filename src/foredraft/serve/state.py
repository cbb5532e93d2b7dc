"""State: an app from before its model is loaded to the end, and how requests start."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio.to_thread
from fastapi import FastAPI

from foredraft.llm import LLM
from foredraft.serve.bodies import BYTES_OF_TOKEN, MORE_BODIES
from foredraft.serve.generations import Model
from foredraft.serve.limits import Bodies, Keys, client_of, owned
from foredraft.serve.logs import REFUSALS, RequestRecord, current, log_access
from foredraft.serve.metrics import Metrics, Tracing, requested
from foredraft.serve.offload import LARGE, in_thread, offloaded, tidy_up
from foredraft.serve.problems import Problem, busy
from foredraft.serve.replies import Reply
from foredraft.serve.requests import Job, as_problems
from foredraft.serve.settings import Settings

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0  # between two looks for slow readers
LOOK_SECONDS = 0.05  # between two looks whether all requests are over
BODY_OF_FIELDS, MIN_BODY = 64 << 10, 1 << 20  # bytes of a body, beside those of the context; in all
Loader = Callable[[], LLM]


class App:
    """The state of one app: its model once it is loaded, and what all routes share."""

    def __init__(self, load: Loader, settings: Settings) -> None:
        self.settings, self._load = settings, load
        self.keys = Keys.of(settings)
        self.metrics = Metrics(vllm=settings.vllm_metrics)
        self.tracing = Tracing.to_collector() if settings.otel else None
        self.model: Model | None = None
        self.failed: BaseException | None = None
        self.draining = False
        self.bodies = Bodies(lambda: self.most_of_bodies)
        self._untidy = False  # a large request has ended since the last tidying up
        self.on_loaded: Callable[[Model | None], None] = lambda model: None  # None: it could not be

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Load the model beside the event loop, and end its requests at the end."""
        loading = asyncio.create_task(self._load_model())
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            loading.cancel()
            with suppress(BaseException):
                await loading
            if self.model is not None:
                await anyio.to_thread.run_sync(self.model.service.stop)
            if self.tracing is not None:
                await anyio.to_thread.run_sync(self.tracing.stop)

    async def _load_model(self) -> None:
        def load() -> LLM:
            llm = self._load()
            llm.requests.policies.measure(llm.loaded.engine)
            return llm

        try:
            llm = await _in_a_daemon(load)
            self.model = Model(llm, self.settings, self.metrics, asyncio.get_running_loop())
        except Exception as error:
            self.failed = error
        # it may print, and a stream that is not read must not stop the event loop
        await anyio.to_thread.run_sync(self.on_loaded, self.model, abandon_on_cancel=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self.model is not None:
                self.model.drop_slow_readers()
            after, self._untidy = self._untidy, False
            await tidy_up(after=after)

    def end(self, record: RequestRecord) -> None:
        """Log, count and trace a request that is over."""
        self._untidy |= record.size > LARGE
        if record.reason is None and (reason := REFUSALS.get(record.status)) is not None:
            record.reason = reason
            self.metrics.refused(reason)
        log_access(record)
        if self.tracing is not None:
            self.tracing.end(record)

    def drain(self) -> None:
        """Refuse further requests; those that run go on."""
        self.draining = True

    async def finish(self) -> None:
        """Wait until all requests are over; those that last longer than allowed end with an error."""
        self.drain()
        end = time.monotonic() + self.settings.drain_seconds
        while self.model is not None and self.model.live:
            if time.monotonic() > end:
                for generation in list(self.model.live):
                    generation.fail(busy("the server is shutting down", seconds=5))
                return
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def most_body(self) -> int:
        length = 0 if self.model is None else self.model.llm.max_length
        return self.settings.max_body or max(MIN_BODY, BYTES_OF_TOKEN * length + BODY_OF_FIELDS)

    @property
    def most_of_bodies(self) -> int:
        rows = 0 if self.model is None else self.model.rows
        return self.settings.max_bodies or (rows + MORE_BODIES) * self.most_body

    def ready(self) -> Model:
        if self.model is None:
            raise Problem(503, "the model is being loaded", code="loading", headers={"Retry-After": "2"})
        return self.model

    async def start(self, shape: type[Reply], body: dict[str, Any]) -> Reply:
        record = current()
        record.operation = shape.operation
        model = self.ready()
        request = await offloaded(record.size, shape.request.chat_of, body)
        record.model = model.names[0]
        if self.tracing is not None:
            record.requested = requested(request)
        count = (request.n or 1) * len(request.sent)
        if self.draining:
            self.metrics.refused("draining")
            raise busy("the server is shutting down", seconds=5)
        permit, generation = model.limits.take(count, client_of(record.key, record.address)), None
        try:
            with as_problems(request, shape.lengths, body):
                job = await in_thread(record.size, Job.of, request, model.llm, model.names)
                if request.ignored_tools:
                    says = "the model does not see the tools that are no functions: %s"
                    logger.warning(says, ", ".join(request.ignored_tools))
                if self.settings.log_prompts:
                    logger.info("prompts %s", job.prompts)
                own = owned(job.one, record, self.settings, request.cache_salt)
                generation = await model.start(replace(job, one=own), permit)
            return shape(record.own_id, model.names[0], body, generation, model.texts)
        except BaseException as error:
            if generation is not None:
                model.end(generation)  # which no reader would
            elif isinstance(error, asyncio.CancelledError):
                self.metrics.count("requests_cancelled")
            permit.free()
            raise


async def _in_a_daemon(load: Loader) -> LLM:
    """Return what `load` returns, from a thread for which the end of the process does not wait."""
    loaded = Future[LLM]()
    loaded.set_running_or_notify_cancel()  # what cancels the wait leaves the thread at work

    def run() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:  # a panic of a library in Rust is no Exception
            is_usual = isinstance(error, Exception)
            loaded.set_exception(error if is_usual else RuntimeError(f"loading failed: {error}"))

    threading.Thread(target=run, name="foredraft-loader", daemon=True).start()
    return await asyncio.wrap_future(loaded)
