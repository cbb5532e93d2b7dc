"""The server: uvicorn around the app. It starts at once, loads the model beside it, and drains at the end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.memory import freeze_what_is_loaded
from foredraft.serve.app import create_app
from foredraft.serve.connections import Connections, HttpConnection, SocketConnection
from foredraft.serve.generations import Model
from foredraft.serve.logs import to_stderr
from foredraft.serve.settings import Settings
from foredraft.serve.state import SWEEP_SECONDS, App

LAST_WORDS_SECONDS = 3  # for sending what is ready, once all requests are over
# Bytes of a connection that the kernel takes before the server waits for the reader. Its own choice is
# megabytes, which is a whole text, so that the server would never notice a slow reader.
SEND_BUFFER = 64 << 10


class _Server(uvicorn.Server):
    """Drains after the first signal; ends the process at once after the second, whatever its threads do."""

    def __init__(self, config: uvicorn.Config, state: App) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(0)  # Python's own end would wait for threads at work
        self._state.drain()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish before connections are closed: uvicorn closes WebSockets at once."""
        await self._state.finish()
        await super().shutdown(sockets)


def serve(load: Callable[[], LLM], settings: Settings, on_ready: Callable[[str, Model, bool], None]) -> bool:
    app = create_app(load, settings)
    state: App = app.state.foredraft
    listening = listen(settings)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = make_server(app, settings)

    def fail(error: BaseException) -> None:
        server.should_exit = True

    def ready(model: Model) -> None:
        freeze_what_is_loaded()  # to walk over it stops all streams for 0.13 s
        on_ready(address, model, bool(state.keys))

    state.on_ready, state.on_failure = ready, fail
    with to_stderr(settings):
        server.run(sockets=[listening])
    if state.failed is not None:
        raise state.failed
    return state.model is not None


def make_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    state: App = app.state.foredraft
    # of a WebSocket, in bytes; `Socket` bounds characters, with an error
    connections = Connections(settings, lambda: 4 * state.most_body, state.bodies)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS, log_config=None,
        ws_per_message_deflate=False, http=cast(Any, partial(HttpConnection, connections=connections)),
        ws=cast(Any, partial(SocketConnection, connections=connections)),
    )  # fmt: skip
    return _Server(config, state)


def listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited: the kernel ends connections that are stuck
            stuck = round(2000 * (settings.slow_reader_seconds + SWEEP_SECONDS))  # after streams are dropped
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(stuck, 2**31 - 1))
        listening.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listening.close()
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"cannot be listened on at {settings.host} ({problem})", option="port", value=settings.port,
            remedy="give another port or host; port 0 takes a free one",
        ) from error  # fmt: skip
    return listening
