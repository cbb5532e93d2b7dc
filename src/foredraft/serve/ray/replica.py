"""The replica: the app of `foredraft serve`, called by the ingress instead of by a socket; and the router.

The router of Ray Serve chooses by the rule of `affinity`. All routers know the same replicas, so they agree
about the replica of a key without a word between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.types import Message

import foredraft
from foredraft.model.memory import freeze_what_is_loaded
from foredraft.serve.affinity import digest, ranked
from foredraft.serve.app import create_app
from foredraft.serve.logs import to_stderr
from foredraft.serve.settings import Settings
from foredraft.serve.state import App

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCall:
    method: str  # GET, POST, ..
    path: str  # of the URL
    query: bytes  # of the URL
    headers: Headers  # as ASGI has them
    body: bytes  # whole
    address: str = ""  # of the client, as Ray's proxy sees it; "" where it is not known
    key: int | None = None  # of `affinity.prompt_key`


TRIED = 4  # replicas that a request tries before it waits; each that is full costs a message


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's class is not typed
    """Prefers the replica that the key of a call has."""

    def initialize_state(self, free: int) -> None:
        """Take the option of the deployment; `free` as in `affinity.bound`."""
        self._free = free
        self._names: dict[str, int] = {}  # of replicas -> their digests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in this order."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # when all are full
        key = next((each.key for each in pending_request.args if isinstance(each, HttpCall)), None)
        known = self._digests([replica.replica_id.unique_id for replica in candidate_replicas])
        lengths = self.replica_queue_len_cache
        loads = [lengths.get(replica.replica_id) or 0 for replica in candidate_replicas]
        places = ranked(key, known, loads, self._free)
        return [[candidate_replicas[place]] for place in places[:TRIED]]

    def _digests(self, names: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        if self._names.keys() != set(names):
            self._names = {name: digest(name) for name in names}
        return np.array([self._names[name] for name in names], dtype=np.uint64)


class Replica:
    """One model and the app around it. Ray counts a replica as ready once it is made."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str | None, load: dict[str, Any], settings: Settings
    ) -> None:
        self._logs = to_stderr(settings)
        self._logs.__enter__()
        self._app = create_app(lambda: foredraft.load(model, **load), settings, local=False)
        self._state: App = self._app.state.foredraft
        self._lifespan = self._app.router.lifespan_context(self._app)
        loaded = asyncio.Event()
        self._state.on_ready = lambda _: loaded.set()
        self._state.on_failure = lambda _: loaded.set()
        await self._lifespan.__aenter__()
        await loaded.wait()
        if self._state.failed is not None:
            await self._lifespan.__aexit__(None, None, None)
            raise self._state.failed
        freeze_what_is_loaded()

    def check_health(self) -> None:
        """Raise RuntimeError where the engine's thread has ended; Ray replaces the replica then."""
        if not self._state.ready().service.alive:
            raise RuntimeError("the engine's thread has ended")

    def metrics(self) -> tuple[str, str]:
        """Return the name of this replica, and its metrics, for Prometheus."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._state.metrics.text().decode()

    async def answer(self, call: HttpCall) -> AsyncIterator[Message | bytes]:
        """Yield the head and the parts of the body of a response; a cancelled call ends its request."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "root_path": "", "method": call.method, "path": call.path, "raw_path": call.path.encode(),
            "query_string": call.query, "headers": call.headers, "server": None,
            "client": (call.address, 0) if call.address else None,
        }  # fmt: skip

        async def receive() -> Message:
            if not unread:  # a client that leaves cancels the app
                await asyncio.Event().wait()
            return unread.pop()

        async def send(message: Message) -> None:
            sent.put_nowait(message)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                sent.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            whole = False
            while not whole:
                messages = [await sent.get()]
                while not sent.empty():  # what has come meanwhile goes in one message of Ray's
                    messages.append(sent.get_nowait())
                body = b""
                for message in messages:
                    if message is None:
                        if not whole:
                            raise RuntimeError("the response broke off; the replica's log has the reason")
                    elif message["type"] == "http.response.start":
                        yield message
                    else:
                        body += message.get("body", b"")
                        whole = not message.get("more_body", False)
                if body:
                    yield body
        finally:
            running.cancel()

    async def __del__(self) -> None:
        """End the engine; Ray calls this once no request is left, or time is up."""
        await self._lifespan.__aexit__(None, None, None)
        self._logs.__exit__(None, None, None)
