"""The replica: the app of `foredraft serve`, called by the ingress instead of by a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from starlette.types import Message, Receive, Send

import foredraft
from foredraft.model.memory import freeze_what_is_loaded
from foredraft.serve.app import create_app
from foredraft.serve.logs import to_stderr
from foredraft.serve.ray.router import HttpCall, HttpHead
from foredraft.serve.settings import Settings
from foredraft.serve.state import App


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
        if not self._state.ready().generations.alive:
            raise RuntimeError("the engine's thread has ended")

    def metrics(self) -> tuple[str, str]:
        """Return the name of this replica, and its metrics, for Prometheus."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, self._state.metrics.text(self._state.ready().update_gauges).decode()

    async def answer(self, call: HttpCall) -> AsyncIterator[HttpHead | bytes]:
        """Yield the head and the parts of the body of a response; a cancelled call ends its request."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()

        async def run() -> None:
            try:
                await self._app(_scope(call), _receive(call), _sender(sent))
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
                        yield HttpHead(message["status"], list(message["headers"]))
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


def _scope(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": call.method, "path": call.path, "raw_path": call.path.encode(), "query_string": call.query,
        "headers": call.headers, "client": (call.address, 0) if call.address else None, "server": None,
    }  # fmt: skip


def _receive(call: HttpCall) -> Receive:
    """Return ASGI's `receive` of a request that was read whole. A client that leaves cancels the app."""
    messages: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("the wait never ends")

    return receive


def _sender(sent: asyncio.Queue[Message | None]) -> Send:
    async def send(message: Message) -> None:
        sent.put_nowait(message)

    return send
