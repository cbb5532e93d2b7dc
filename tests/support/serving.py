"""A server in a thread of this process, on a free port of 127.0.0.1."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from websockets.sync.client import ClientConnection, connect

import foredraft
from foredraft import LLM, demo
from foredraft.serve.app import create_app
from foredraft.serve.server import listen, make_server
from foredraft.serve.settings import Settings
from foredraft.serve.state import App

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# assistant:"
)


@dataclass
class Served:
    url: str
    llm: LLM
    state: App
    client: httpx.Client

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))

    def finished(self, reason: str) -> float:
        return self.metric(f'foredraft_requests_finished_total{{reason="{reason}"}}')

    def wait(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)

    def idle(self) -> bool:
        engine, model = self.llm.loaded.engine, self.state.model
        return engine.scheduler.idle and model is not None and not model.limits.samples.total

    def websocket(self, **options: Any) -> ClientConnection:
        return connect(self.url.replace("http", "ws") + "/v1/stream", **options)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def chat_model(folder: Path) -> Path:
    shutil.copytree(demo.target_path(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def load_chat(folder: Path, **options: object) -> LLM:
    options = {"policy": "fixed", "max_batch": 4, "max_length": 512} | options
    return foredraft.load(chat_model(folder / "demo"), draft=demo.draft_path(), **options)


@contextmanager
def serving(
    llm: LLM, *, prepare: Callable[[FastAPI], object] = lambda app: None, **settings: object
) -> Iterator[Served]:
    """Serve a model until the block ends; `prepare` may add to the app before it starts."""
    given = Settings(**{"port": 0, "drain_seconds": 10.0, **settings})
    app = create_app(lambda: llm, given)
    prepare(app)
    server, listening = make_server(app, given), listen(given)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            served = Served(url, llm, app.state.foredraft, client)
            served.wait(lambda: served.state.model is not None)
            yield served
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
