"""Servers under load and at their limits: queues, keys, compilations, and engines that fail."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import foredraft
from benchmarks.soak import Soak, settled
from foredraft import SamplingParams
from foredraft.constraints import ConstraintFactory
from foredraft.decode.engine import Engine
from foredraft.decode.text_buffer import StopAutomaton
from foredraft.llm import LLM
from foredraft.llm.service import Service
from foredraft.serve import offload
from foredraft.serve.app import create_app
from foredraft.serve.settings import Settings
from tests.support.loaded import engine_of
from tests.support.panics import panic
from tests.support.running import forked, run_code
from tests.support.serving import Served, serving

LONG: dict[str, Any] = {"prompt": "def f(n):\n", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def post(served: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return served.client.post("/v1/completions", json={"model": "demo", **body}, headers=headers)


def opened(client: httpx.Client, **body: Any) -> Any:
    return client.stream("POST", "/v1/completions", json={"model": "demo", "stream": True, **LONG, **body})


def test_a_full_queue_refuses_and_says_when_to_come_again(llm: LLM) -> None:
    with serving(llm, max_queued=1) as served, httpx.Client(base_url=served.url) as client:
        with opened(client, n=4), opened(client):  # of four rows
            served.wait(lambda: served.metric("foredraft_requests_waiting") == 1)
            refused = post(served, prompt="x")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "overloaded_error"
        served.wait(served.idle)
        assert post(served, prompt="x", max_tokens=1).status_code == 200
        refused = post(served, prompt="x", n=6)  # more than there is ever room for
        assert refused.status_code == 400 and "6 samples" in refused.json()["error"]["message"]


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


def test_keys_are_asked_for_and_limited(llm: LLM, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", "three")
    with (
        serving(llm, api_key_file=keys, max_per_key=1) as served,
        httpx.Client(base_url=served.url) as client,
    ):

        def asked(header: str) -> httpx.Response:
            return post(served, {"authorization": header.encode()}, prompt="x", max_tokens=1)

        for wrong in ("", "Bearer", "Bearer nope", "Basic one", "one", "Bearer on", "Bearer one\u00e9"):
            refused = asked(wrong)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer", wrong
        assert client.get("/health").status_code == 200
        assert [asked(f"Bearer {key}").status_code for key in ("one", "two", "three")] == [200] * 3
        client.headers["authorization"] = served.client.headers["authorization"] = "Bearer one"
        with opened(client):
            served.wait(lambda: served.metric("foredraft_requests_running") == 1)
            refused = asked("Bearer one")
            assert refused.status_code == 429 and "retry-after" in refused.headers
            assert asked("Bearer two").status_code == 200


def test_the_server_answers_while_the_model_is_loading(llm: LLM) -> None:
    from fastapi.testclient import TestClient

    loaded = threading.Event()

    def load() -> LLM:
        loaded.wait(30)
        return llm

    with TestClient(create_app(load, Settings()), base_url="http://127.0.0.1") as client:
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "loading"
        assert client.post("/v1/completions", json={"model": "demo", "prompt": "x"}).status_code == 503
        loaded.set()


def test_an_engine_that_fails_fails_its_requests_and_lives(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Engine.round
    rounds = iter([True] * 3 + [False])

    def failing(engine: Engine) -> Any:
        if next(rounds, True):
            return round_(engine)
        raise RuntimeError("a planted failure")

    with serving(llm) as served, httpx.Client(base_url=served.url) as client:
        monkeypatch.setattr(Engine, "round", failing)
        with opened(client) as stream:
            whole = post(served, **LONG)
            lines = [line for line in stream.iter_lines() if line]
        errors = [json.loads(line[6:])["error"] for line in lines if "planted" in line]
        errors += [whole.json()["error"]] if whole.status_code == 500 else []
        assert errors
        for error in errors:
            assert "RuntimeError: a planted failure" in error["message"]
            assert error["code"] == "generation_failed"
        assert lines[-1] == "data: [DONE]"
        assert post(served, prompt="x", max_tokens=2).status_code == 200
        served.wait(served.idle)


def test_a_frame_that_is_too_large_is_refused_and_the_socket_goes_on(llm: LLM) -> None:
    with serving(llm, max_body=200) as served, served.websocket() as ws:
        ws.send(json.dumps({"id": "a", "model": "demo", "prompt": "x" * 200}))
        answer = json.loads(ws.recv(timeout=10))
        assert answer["id"] is None and answer["error"]["code"] == "body_too_large"
        ws.send(json.dumps({"id": "a", "model": "demo", "prompt": "x", "max_tokens": 1}))
        assert "chunk" in json.loads(ws.recv(timeout=10))


def test_a_silent_stream_sends_comments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = Engine.round

    def slow(engine: Engine) -> Any:
        time.sleep(0.2)
        return round_(engine)

    monkeypatch.setattr(Engine, "round", slow)
    with serving(llm, heartbeat_seconds=0.05) as served, opened(served.client, max_tokens=3) as stream:
        text = "".join(stream.iter_text())
    assert ": ping\n\n" in text and text.endswith("data: [DONE]\n\n")


def test_prompts_that_begin_alike_are_read_once(llm: LLM) -> None:
    common = {"max_tokens": 8, "temperature": 0, "logprobs": 1}
    bodies = [{"prompt": [*range(5, 275), last], **common} for last in (7, 8)]
    engine_of(llm).prefix_cache = None
    with serving(llm, prefix_cache=0, vllm_metrics=True) as served:
        want = [post(served, **body).json()["choices"][0]["logprobs"] for body in bodies]
        assert engine_of(llm).prefix_cache is None
        assert served.metric("vllm:generation_tokens_total") == 16
        assert "vllm:spec_decode_num_accepted_tokens_total" in served.client.get("/metrics").text
    try:
        with serving(llm) as served:
            found = [post(served, **body).json() for body in bodies]
            assert served.metric("foredraft_prefix_cache_hits_total") == 270
    finally:
        engine_of(llm).prefix_cache = None
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found] == [0, 270]
    assert [each["choices"][0]["logprobs"] for each in found] == want


def test_a_request_cancelled_in_its_preparation_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Service.submit

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return submit(*args, **more)

    monkeypatch.setattr(Service, "submit", slow)
    with serving(llm) as served:
        with served.websocket() as ws:
            ws.send(json.dumps({"id": "a", "model": "demo", "n": 4, **LONG}))
            time.sleep(0.2)
            ws.send('{"id": "a", "cancel": true}')
            assert json.loads(ws.recv(timeout=10)) == {"id": "a", "done": True, "reason": "cancelled"}
        time.sleep(0.5)
        served.wait(served.idle, 5)
        assert not served.state.ready().live
        assert served.finished("cancelled") == 4 and served.finished("length") == 0


SERVE = """
import gc, os, signal
import foredraft
from foredraft.serve.server import serve
from foredraft.serve.settings import Settings

def ready(address, model, needs_key):
    print(gc.get_freeze_count())
    os.kill(os.getpid(), signal.SIGTERM)

gc.unfreeze()  # what the parent of this process froze
serve(lambda: foredraft.load(policy="fixed", max_length=64), Settings(port=0), ready)
"""


@pytest.mark.heavy
def test_what_is_loaded_is_frozen_before_the_first_request() -> None:
    done = forked(run_code, SERVE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000


def brief(served: Served, **body: Any) -> httpx.Response:
    return post(served, **{"prompt": "x", "max_tokens": 2, **body})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stop": ["a" * 1001]}, "stop"),
        ({"ban": ["\u4f60" * 300, "b" * 200]}, "ban"),
        ({"regex": "a" * 1001}, "regex"),
        ({"stop": ["a" * 400], "ban": ["b" * 601]}, "ban"),
    ],
    ids=["stop", "ban", "regex", "together"],
)
def test_bytes_of_patterns_are_bounded(llm: LLM, options: dict[str, Any], param: str) -> None:
    with serving(llm, max_patterns=1000) as served:
        refused = brief(served, **options)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        assert "of 1000 at most (--max-patterns)" in refused.json()["error"]["message"]
        served.wait(served.idle)
        assert brief(served, stop=["a" * 400], ban=["b" * 400]).status_code == 200


@pytest.mark.heavy
def test_endless_compilations_stop_only_those_behind_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, maker = threading.Event(), ConstraintFactory.maker

    def slow(self: ConstraintFactory, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
        if params.regex is not None:
            ends.wait(60)
        return maker(self, prompt, params, **options)

    monkeypatch.setattr(ConstraintFactory, "maker", slow)
    monkeypatch.setattr(offload, "SECONDS", 2.0)
    with serving(llm) as served, ThreadPoolExecutor(70) as pool:
        asked = [pool.submit(brief, served, regex="[a-z]+") for _ in range(66)]
        served.wait(lambda: any(each.done() for each in asked))  # the two that had no place in the queue
        assert served.client.get("/health", timeout=3).status_code == 200
        assert brief(served).status_code == 200
        answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {503}
        messages = [answer.json()["error"]["message"] for answer in answers]
        assert sum("64 requests wait" in message for message in messages) == 2
        assert sum("were not compiled within 2 s" in message for message in messages) == 64
        ends.set()
        served.wait(served.idle)
        assert brief(served, regex="[a-z]+").status_code == 200


def test_a_panic_of_a_compilation_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise panic()

    with serving(llm) as served:
        with monkeypatch.context() as patch:
            patch.setattr(ConstraintFactory, "maker", fail)
            assert [brief(served, regex="[a-z]+").status_code for _ in range(3)] == [500] * 3
        assert brief(served, regex="[a-z]+").status_code == 200


def test_stop_strings_are_compiled_once_for_all_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = list[tuple[str, ...]](), StopAutomaton.__init__

    def note(self: StopAutomaton, strings: tuple[str, ...]) -> None:
        made.append(strings)
        init(self, strings)

    monkeypatch.setattr(StopAutomaton, "__init__", note)
    llm.generate(["x", "y"], SamplingParams(stop=["abc"], max_new_tokens=2, seed=1), n=4)
    assert made == [("abc",)]
    with serving(llm) as served:
        assert brief(served, prompt=["x", "y", "z"], stop=["xyz"], n=2).status_code == 200
    assert made == [("abc",), ("xyz",)]
    llm.generate("x", SamplingParams(stop=["a" * (257 << 10)], max_new_tokens=1), n=2)
    assert len(made) == 3 and llm.requests.stops.total <= 256 << 10, "what is too large is not kept"


@pytest.mark.heavy
@pytest.mark.parametrize("turns", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_is_left_after_clients_of_all_kinds(llm: LLM, turns: int) -> None:
    with serving(llm, max_queued=16, max_body=1 << 20) as served:
        model = served.state.ready()
        loop = model.loop

        def tasks() -> int:
            async def count() -> int:
                return len(asyncio.all_tasks())

            return asyncio.run_coroutine_threadsafe(count(), loop).result(10)

        served.client.get("/health")  # its connection stays open
        soak = Soak(served.url, new_tokens=8)
        asyncio.run(soak.prepare())
        engine, before, threads = engine_of(llm), tasks(), set(threading.enumerate())
        asyncio.run(soak.run(40, lambda done: done >= turns))
        assert soak.wrong == []
        assert len(soak.done) == len(soak.kinds)
        assert asyncio.run(settled(served.url))
        served.wait(served.idle)
        assert engine.rows.sequences == [] and not any(any(cache.lengths) for cache in engine.rows.caches)
        served.wait(lambda: tasks() <= before)
        assert not model.live and not model.limits.tokens.total and not model.limits.samples.total
        assert not model.service._open
        left = [each.name for each in set(threading.enumerate()) - threads if each.is_alive()]
        # AnyIO's pool ends when it is idle
        assert all(name.startswith("AnyIO worker") for name in left), left


@pytest.mark.parametrize("mib", [0, 64])
def test_beginnings_in_a_folder_outlive_the_server(tmp_path: Path, mib: int) -> None:
    """With memory for them, or without any."""
    for cached in (0, 270, 270):
        with (
            foredraft.load(max_batch=2, max_length=512, prefix_folder=tmp_path / "own") as llm,
            serving(llm, prefix_cache=mib) as served,
        ):
            reply = post(served, prompt=[*range(5, 276)], max_tokens=2, temperature=0).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
