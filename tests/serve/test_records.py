"""Request ids, lines of the log and traces: what they say, and what they never say."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from foredraft.llm import LLM
from foredraft.serve import logs
from foredraft.serve.logs import to_stderr
from foredraft.serve.settings import Settings
from tests.support.raw import RawClient, request_bytes
from tests.support.serving import Served, load_chat, serving

BODY: dict[str, Any] = {"model": "demo", "prompt": "a secret prompt", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


@contextmanager
def logged(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[io.StringIO]:
    """Catch what a server writes to the standard error stream."""
    stream = Written()
    monkeypatch.setattr("sys.stderr", stream)
    with to_stderr(Settings(**settings)):
        yield stream


class Written(io.StringIO):
    """What was written, once the thread that writes lines has written all."""

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return super().getvalue()


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def post(served: Served, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return served.client.post(path, **{"json": BODY, **more})


@pytest.mark.parametrize(
    ("given", "taken"),
    [("mine-1", True), ("!~", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("caf\u00e9", False), ("a\tb", False), ("", False)],
    ids=lambda value: repr(value)[:12],
)  # fmt: skip
def test_an_id_is_taken_if_it_is_short_and_printable(llm: LLM, given: str, taken: bool) -> None:
    with serving(llm) as served:
        for path, status in (("/v1/completions", 200), ("/nowhere", 404)):
            found = post(served, path, headers={"x-request-id": given.encode("latin-1")})
            assert found.status_code == status
            id = found.headers["x-request-id"]
            assert (id == given) == taken and id.isascii() and 0 < len(id) <= 128


def test_every_error_has_an_id(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a planted defect")

    with serving(llm, max_body=500) as served, logged(monkeypatch, log_format="json") as stream:
        ids = [
            post(served, json={**BODY, "temperature": -1}).headers["x-request-id"],
            post(served, content=b"{" * 600).headers["x-request-id"],
            post(served, headers={"origin": "https://evil.example"}).headers["x-request-id"],
        ]
        monkeypatch.setattr(type(served.state), "start", broken)
        failed = post(served, headers={"x-request-id": "bug"})
        assert failed.status_code == 500 and failed.headers["x-request-id"] == "bug"
        lines = lines_of(stream)
    assert len(set(ids)) == 3
    told = {line["request_id"]: line for line in lines if "status" in line}
    assert [told[id]["reason"] for id in ids] == ["invalid", "body too large", "origin"]
    assert told["bug"]["status"] == 500 and told["bug"]["reason"] == "defect"
    # the web server may write a second one, after the request
    tracebacks = [line for line in lines if "a planted defect" in line.get("traceback", "")]
    assert tracebacks[0]["request_id"] == "bug"


def test_a_line_tells_what_happened_and_nothing_secret(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice wonderland\nqueen-of-hearts\n", encoding="utf-8")
    with serving(llm, api_key_file=file) as served, logged(monkeypatch, log_format="json") as stream:
        for key in ("wonderland", "queen-of-hearts", "rabbit"):
            post(served, headers={"authorization": f"Bearer {key}", "x-request-id": key[:3]})
        served.client.get("/health")
        served.client.get("/metrics", headers={"authorization": "Bearer wonderland"})
        text = stream.getvalue()
        alice, queen, rabbit = lines_of(stream)
    assert alice.keys() == {
        "time", "level", "logger", "message", "request_id", "method", "path", "status", "prompt_tokens", "tokens",
        "seconds_to_first_token", "seconds", "key",
    }  # fmt: skip
    assert (alice["method"], alice["path"], alice["status"]) == ("POST", "/v1/completions", 200)
    assert alice["tokens"] == 6 and alice["prompt_tokens"] == len(llm.encode(BODY["prompt"])[0])
    assert 0 < alice["seconds_to_first_token"] <= alice["seconds"]
    assert (alice["key"], queen["key"]) == ("alice", "key 1") and "key" not in rabbit
    assert (rabbit["status"], rabbit["reason"]) == (401, "api key")
    for secret in ("wonderland", "hearts", "rabbit", "secret prompt"):
        assert secret not in text


def test_a_line_of_text_is_one_line(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served, logged(monkeypatch) as stream:
        post(served, headers={"x-request-id": "one"})
        post(served, "/no%20where%0Aelse")
        logging.getLogger("foredraft").warning("two\nlines")
        found = stream.getvalue().splitlines()
    assert (
        len(found) == 3
        and " info request request_id=one method=POST path=/v1/completions status=200 " in found[0]
    )
    assert r'path="/no where\nelse"' in found[1] and found[2].endswith("warning two lines")


def test_lines_of_requests_can_be_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served, logged(monkeypatch, access_log=False) as stream:
        post(served)
        assert stream.getvalue() == ""


def test_prompts_are_logged_if_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(llm, log_prompts=True) as served,
        logged(monkeypatch, log_format="json", log_prompts=True) as stream,
    ):
        post(served, headers={"x-request-id": "p"})
        [prompt, _] = lines_of(stream)
    assert prompt["request_id"] == "p" and str(llm.encode(BODY["prompt"])) in prompt["message"]


def test_a_cancelled_a_dropped_and_a_refused_request_say_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {**BODY, "max_tokens": 400, "stream": True}
    with (
        serving(llm, max_queued=0, max_unread=16, slow_reader_seconds=0.5) as served,
        logged(monkeypatch, log_format="json") as stream,
    ):
        with RawClient(served.url) as slow:
            slow.send(request_bytes({**long, "logprobs": 20}, x_request_id="slow"))
            served.wait(lambda: "slow reader" in stream.getvalue())
        served.wait(served.idle)
        with served.client.stream(
            "POST", "/v1/completions", json={**long, "n": 2}, headers={"x-request-id": "left"}
        ):
            post(served, headers={"x-request-id": "full"})
        served.wait(lambda: '"left"' in stream.getvalue())
        told = {line["request_id"]: line for line in lines_of(stream) if "status" in line}
    assert {id: line.get("reason") for id, line in told.items()} == {
        "slow": "slow reader", "left": "cancelled", "full": "queue full",
    }  # fmt: skip
    assert told["full"]["status"] == 503


def test_requests_of_a_socket_have_lines_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served, logged(monkeypatch, log_format="json") as stream:
        url = served.url.replace("http", "ws") + "/v1/stream"
        with connect(url, additional_headers={"x-request-id": "sock"}) as ws:
            assert ws.response is not None and ws.response.headers["x-request-id"] == "sock"
            for frame in ({**BODY, "id": "a"}, {**BODY, "id": "b", "model": "nope"}):
                ws.send(json.dumps(frame))
                while "done" not in json.loads(ws.recv(timeout=30)):
                    pass
        served.wait(lambda: stream.getvalue().count("\n") == 3)
        a, b, whole = lines_of(stream)
    assert (a["request_id"], a["status"], a["tokens"]) == ("sock/a", 200, 6)
    assert (b["request_id"], b["status"], b["reason"]) == ("sock/b", 404, "not found")
    assert (whole["request_id"], whole["status"], whole["method"]) == ("sock", 101, "WEBSOCKET")


def test_traces_follow_the_conventions(llm: LLM) -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from foredraft.serve.tracing import Tracing

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(llm) as served:
        served.state.tracing = Tracing(provider)
        trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        post(
            served,
            headers={"traceparent": f"00-{trace}-{parent}-01", "x-request-id": "t"},
            json={**BODY, "temperature": 0, "n": 2},
        )
        chat = {"model": "nope", "messages": [{"role": "user", "content": "x"}]}
        post(served, "/v1/chat/completions", json=chat)
        served.client.get("/v1/models")
        done, refused = exporter.get_finished_spans()
    assert done.name == "text_completion demo" and done.kind.name == "SERVER"
    assert done.parent is not None and f"{done.parent.span_id:016x}" == parent
    assert f"{done.context.trace_id:032x}" == trace
    prompt_tokens = len(llm.encode(BODY["prompt"])[0])
    found = dict(done.attributes or {})
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "foredraft",
        "gen_ai.request.model": "demo", "gen_ai.request.max_tokens": 6, "gen_ai.request.temperature": 0.0,
        "gen_ai.request.choice.count": 2, "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("length", "length"), "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 12, "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": 200,
        "foredraft.request_id": "t",
    }  # fmt: skip
    [event] = done.events
    assert event.name == "gen_ai.first_token" and done.start_time < event.timestamp <= done.end_time
    assert done.status.is_unset and refused.name == "chat nope" and refused.parent is None
    assert refused.attributes["error.type"] == "not found" and not refused.status.is_ok


def test_a_stream_of_errors_that_is_not_read_stops_nothing_and_loses_only_lines(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_HELD", 10_000)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.1)
    reading, writing = os.pipe()
    with open(writing, "w") as pipe, open(reading, "rb") as end:
        monkeypatch.setattr("sys.stderr", pipe)
        with serving(llm) as served, to_stderr(Settings()):
            [handler] = logging.getLogger().handlers
            assert isinstance(handler, logs.Writer)
            while handler.dropped < 10:  # the pipe is full, and so is the queue
                assert served.client.get("/nowhere").status_code == 404
            assert handler._held <= 10_000
            dropped = handler.dropped
            found = b""
            while b"were dropped" not in found:
                found += os.read(reading, 1 << 16)
            assert f" {dropped} lines".encode() in found and found.count(b"status=404") > 100
        pipe.close()
        end.read()
