"""Servers under load and at their limits: queues, keys, drains, slow readers, and engines that fail."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.decode.engine import Engine
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.serve.keys import Keys
from foredraft.serve.problems import Problem
from foredraft.serve.settings import Settings
from foredraft.serve.streaming import server_sent
from tests.support.loaded import engine_of
from tests.support.serving import Served, load_chat, serving

LONG: dict[str, Any] = {"prompt": "def f(n):\n", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


def post(served: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return served.client.post("/v1/completions", json={"model": "demo", **body}, headers=headers)


def opened(served: Served, client: httpx.Client, **body: Any) -> Any:
    """Open a stream."""
    return client.stream("POST", "/v1/completions", json={"model": "demo", "stream": True, **LONG, **body})


def test_a_full_queue_refuses_and_says_when_to_come_again(llm: LLM) -> None:
    with serving(llm, max_queued=1) as served, httpx.Client(base_url=served.url) as client:
        with opened(served, client, n=2), opened(served, client):
            served.wait(lambda: served.metric("foredraft_requests_waiting") == 1)
            refused = post(served, prompt="x")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "overloaded_error"
        served.wait(served.idle)
        assert post(served, prompt="x", max_tokens=1).status_code == 200
        refused = post(served, prompt="x", n=4)  # more than there is ever room for
        assert refused.status_code == 400 and "4 samples" in refused.json()["error"]["message"]


def test_a_client_that_leaves_within_its_body_is_no_error(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with serving(llm) as served:
        for path in ("completions", "chat/completions", "responses", "messages"):
            with socket.create_connection((served.client.base_url.host, served.client.base_url.port)) as raw:
                raw.sendall(
                    f"POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99\r\n\r\n{{".encode()
                )
                time.sleep(0.05)  # the head is read, and the body awaited
        served.wait(served.idle)
        assert post(served, prompt="x", max_tokens=1).status_code == 200
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_prompt_tokens_are_bounded_in_all(llm: LLM) -> None:
    with serving(llm, max_queued_tokens=100) as served:
        assert post(served, prompt=[5] * 101, max_tokens=1).status_code == 400
        assert post(served, prompt=[5] * 60, n=2, max_tokens=1).status_code == 400
        assert post(served, prompt=[5] * 100, max_tokens=1).status_code == 200
        assert served.idle()


def test_keys_are_asked_for_and_limited(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\nsecond\n", encoding="utf-8")
    monkeypatch.setenv("FOREDRAFT_API_KEY", "third")
    with (
        serving(llm, api_key_file=file, max_per_key=1) as served,
        httpx.Client(base_url=served.url) as client,
    ):
        for wrong in (
            None,
            "Bearer",
            "Bearer nope",
            "Basic first",
            "first",
            "Bearer firs",
            "Bearer first\u00e9",
        ):
            headers = {} if wrong is None else {"authorization": wrong.encode()}
            refused = client.post("/v1/completions", json={"model": "demo", "prompt": "x"}, headers=headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer", wrong
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        for key in ("first", "second", "third"):
            assert (
                post(served, {"authorization": f"Bearer {key}"}, prompt="x", max_tokens=1).status_code == 200
            )
        client.headers["authorization"] = served.client.headers["authorization"] = "Bearer first"
        with opened(served, client):
            served.wait(lambda: served.metric("foredraft_requests_running") == 1)
            refused = post(served, {"authorization": "Bearer first"}, prompt="x", max_tokens=1)
            assert refused.status_code == 429 and "retry-after" in refused.headers
            assert (
                post(served, {"authorization": "Bearer second"}, prompt="x", max_tokens=1).status_code == 200
            )


@pytest.mark.parametrize("key", ["caf\u00e9", "\u00e0", "\u20ac", "\u4f60\u597d", "plain"])
def test_a_key_may_have_any_letters(tmp_path: Path, key: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"other\nthe name {key}\n", encoding="utf-8")
    keys = Keys.of(Settings(api_key_file=file))
    sent = [key.encode()] + ([key.encode("latin-1")] if max(key) < "\u0100" else [])
    for data in sent:  # as clients write it; ASGI hands bytes over as Latin-1
        assert (
            keys.check(f"Bearer {data.decode('latin-1')}")
            == keys.check(None, data.decode("latin-1"))
            == "the name"
        )
    for wrong in ("?", "caf?", "", "\u00e0\u00a0", key[:-1]):
        with pytest.raises(Problem):
            keys.check(f"Bearer {wrong}")


def test_a_file_of_keys_without_a_key_is_refused(tmp_path: Path) -> None:
    for content in (None, b"\n \n", b"\xff"):
        file = tmp_path / "keys"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match="api_key_file is"):
            Keys.of(Settings(api_key_file=file))


def test_a_drain_lets_requests_finish_and_refuses_others(llm: LLM) -> None:
    with serving(llm) as served, httpx.Client(base_url=served.url) as client:
        with opened(served, client) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.state.drain()
            refused = post(served, prompt="x")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
            assert served.client.get("/health").json()["error"]["code"] == "draining"
            rest = list(lines)
        assert "data: [DONE]" in rest


def test_the_server_answers_while_the_model_is_loading(llm: LLM) -> None:
    from fastapi.testclient import TestClient

    from foredraft.serve.app import create_app

    loaded = threading.Event()

    def load() -> LLM:
        loaded.wait(30)
        return llm

    with TestClient(create_app(load, Settings()), base_url="http://127.0.0.1") as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "loading"
        assert client.post("/v1/completions", json={"model": "demo", "prompt": "x"}).status_code == 503
        loaded.set()


def test_bodies_are_bounded(llm: LLM) -> None:
    with serving(llm, max_body=1000) as served:
        assert post(served, prompt="x" * 1000).status_code == 413

        def chunks() -> Iterator[bytes]:
            yield from [b'{"model": "demo", "prompt": "'] + [b"x" * 100] * 20

        assert served.client.post("/v1/completions", content=chunks()).status_code == 413


def test_an_engine_that_fails_fails_its_requests_and_lives(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Engine.round
    rounds = iter([True] * 3 + [False])

    def failing(engine: Engine) -> Any:
        if next(rounds, True):
            return round_(engine)
        raise RuntimeError("a planted failure")

    with serving(llm) as served, httpx.Client(base_url=served.url) as client:
        monkeypatch.setattr(Engine, "round", failing)
        with opened(served, client) as stream:
            whole = post(served, **LONG)
            events_ = [line for line in stream.iter_lines() if line]
        failed = [json.loads(line[6:]) for line in events_ if "planted" in line]
        assert failed or whole.status_code == 500
        for error in [
            *(each["error"] for each in failed),
            *([whole.json()["error"]] if whole.status_code == 500 else []),
        ]:
            assert (
                "RuntimeError: a planted failure" in error["message"] and error["code"] == "generation_failed"
            )
        assert events_[-1] == "data: [DONE]"
        assert post(served, prompt="x", max_tokens=2).status_code == 200
        served.wait(served.idle)


async def _unread_stream(served: Served) -> str:
    """Take the first event of a stream, and no more; return how the stream ends."""
    import asyncio

    from foredraft.serve.completions import CompletionReply

    model = served.state.ready()
    reply = await served.state.start(CompletionReply, {"model": "demo", "stream": True, **LONG}, "")

    async def read() -> None:
        with model.generations.read(reply.generation):
            async for _ in server_sent(reply.events(None), reply.done):
                await asyncio.sleep(30)

    try:
        await asyncio.wait_for(asyncio.create_task(read()), 10)
    except asyncio.CancelledError:
        return "dropped"
    return "read"


def test_a_reader_that_takes_nothing_is_dropped(llm: LLM) -> None:
    import asyncio

    with serving(llm, slow_reader_seconds=0.3) as served:
        model = served.state.model
        assert model is not None
        future = asyncio.run_coroutine_threadsafe(_unread_stream(served), model.generations._loop)
        assert future.result(20) == "dropped"
        served.wait(served.idle)
        assert served.metric("foredraft_requests_refused_total") == 1


def test_a_frame_that_is_too_large_is_refused_and_the_socket_goes_on(llm: LLM) -> None:
    from websockets.sync.client import connect

    with serving(llm, max_body=200) as served, connect(served.url.replace("http", "ws") + "/v1/stream") as ws:
        ws.send(json.dumps({"id": "a", "model": "demo", "prompt": "x" * 200}))
        answer = json.loads(ws.recv(timeout=10))
        assert answer["id"] is None and answer["error"]["code"] == "body_too_large"
        ws.send(json.dumps({"id": "a", "model": "demo", "prompt": "x", "max_tokens": 1}))
        assert "chunk" in json.loads(ws.recv(timeout=10))


@pytest.mark.slow
def test_a_socket_that_never_reads_is_dropped_and_no_other_client_waits(llm: LLM) -> None:
    from websockets.sync.client import connect

    with serving(llm, slow_reader_seconds=0.3) as served:
        port = int(served.url.rpartition(":")[2])
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", port))
        with connect(f"ws://127.0.0.1:{port}/v1/stream", sock=raw, max_queue=1, close_timeout=0.1) as ws:
            fat = {"model": "demo", **LONG, "logprobs": 20, "provenance": True}
            for id in range(24):  # megabytes: more than the buffers of both ends hold
                ws.send(json.dumps({"id": str(id), **fat}))
            served.wait(lambda: served.metric("foredraft_requests_refused_total") > 0, 60)
            assert post(served, prompt="x", max_tokens=2).status_code == 200
        served.wait(served.idle)


def test_a_silent_stream_sends_comments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    round_ = Engine.round

    def slow(engine: Engine) -> Any:
        time.sleep(0.2)
        return round_(engine)

    monkeypatch.setattr(Engine, "round", slow)
    with (
        serving(llm, heartbeat_seconds=0.05) as served,
        opened(served, served.client, max_tokens=3) as stream,
    ):
        text = "".join(stream.iter_text())
    assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_vllm_names_of_metrics(llm: LLM) -> None:
    with serving(llm, vllm_metrics=True) as served:
        post(served, prompt="x", max_tokens=5)
        assert served.metric("vllm:generation_tokens_total") == 5
        assert "vllm:spec_decode_num_accepted_tokens_total" in served.client.get("/metrics").text


def test_prompts_that_begin_alike_are_read_once(llm: LLM) -> None:
    prompt = [5 + place % 90 for place in range(450)]
    bodies = [
        {"prompt": [*prompt, last], "max_tokens": 8, "temperature": 0, "logprobs": 1} for last in (7, 8)
    ]
    engine_of(llm).prefix_cache = None
    with serving(llm, prefix_cache=0) as served:
        want = [post(served, **body).json()["choices"] for body in bodies]
        assert engine_of(llm).prefix_cache is None
    try:
        with serving(llm) as served:
            found = [post(served, **body).json() for body in bodies]
            hits = served.metric("foredraft_prefix_cache_hits_total")
    finally:
        engine_of(llm).prefix_cache = None
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found] == [0, 256]
    assert hits == 256

    def shown(choices: Any) -> list[Any]:
        return [(choice["text"], choice["logprobs"]) for choice in choices]

    assert [shown(each["choices"]) for each in found] == [shown(each) for each in want]


def test_a_client_that_leaves_while_its_request_is_prepared_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preparing a request may take long, for a grammar or a long list of bans; a socket cancels it meanwhile."""
    import time

    from websockets.sync.client import connect

    from foredraft.llm.service import Service

    submit = Service.submit

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return submit(*args, **more)

    monkeypatch.setattr(Service, "submit", slow)
    with serving(llm) as served:
        with connect(served.url.replace("http", "ws") + "/v1/stream") as ws:
            ws.send(json.dumps({"id": "a", "model": "demo", "n": 4, **LONG}))
            time.sleep(0.2)
            ws.send('{"id": "a", "cancel": true}')
            assert json.loads(ws.recv(timeout=10)) == {"id": "a", "done": True, "reason": "cancelled"}
        time.sleep(0.5)
        served.wait(served.idle, 5)
        assert not served.state.ready().generations._live
        assert served.finished("cancelled") == 4 and served.finished("length") == 0
