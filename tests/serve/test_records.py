"""Request ids, lines of the log, traces and metrics: what they say, and what they never say."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.llm import LLM
from foredraft.serve import logs, server
from foredraft.serve.logs import to_stderr
from foredraft.serve.settings import Settings
from tests.support.raw import RawClient, request_bytes
from tests.support.serving import Served, serving

BODY: dict[str, Any] = {"model": "demo", "prompt": "a secret prompt", "max_tokens": 6, "ignore_eos": True}


@contextmanager
def logged(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[io.StringIO]:
    stream = Written()
    monkeypatch.setattr("sys.stderr", stream)
    with to_stderr(Settings(**settings)):
        yield stream


class Written(io.StringIO):
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
def test_an_id_is_taken_if_it_is_short_and_printable(served: Served, given: str, taken: bool) -> None:
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


def test_a_line_tells_nothing_secret(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_line_of_text_is_one_line_and_can_be_left_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logged(monkeypatch) as stream:
        post(served, headers={"x-request-id": "one"})
        post(served, "/no%20where%0Aelse")
        logging.getLogger("foredraft").warning("two\nlines")
        one, other, last = stream.getvalue().splitlines()
    assert " info request request_id=one method=POST path=/v1/completions status=200 " in one
    assert r'path="/no where\nelse"' in other and last.endswith("warning two lines")
    with logged(monkeypatch, access_log=False) as stream:
        post(served)
        assert stream.getvalue() == ""


def test_prompts_are_logged_if_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"log_prompts": True}
    with serving(llm, **settings) as served, logged(monkeypatch, log_format="json", **settings) as stream:
        post(served, headers={"x-request-id": "p"})
        [prompt, _] = lines_of(stream)
    assert prompt["request_id"] == "p" and str(llm.encode(BODY["prompt"])) in prompt["message"]


def test_cancelled_dropped_and_refused_requests_say_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {**BODY, "max_tokens": 400, "stream": True}
    monkeypatch.setattr(
        server, "SWEEP_SECONDS", 600.0
    )  # on a busy machine the kernel ends the connection first
    with (
        serving(llm, max_queued=0, max_unread=16, slow_reader_seconds=0.5) as served,
        logged(monkeypatch, log_format="json") as stream,
    ):
        with RawClient(served.url) as slow:
            slow.send(request_bytes({**long, "logprobs": 20}, x_request_id="slow"))
            served.wait(lambda: "slow reader" in stream.getvalue(), 120)  # once it has more than sockets hold
        served.wait(served.idle)
        rows, own = {**long, "n": 4}, {"x-request-id": "left"}
        with served.client.stream("POST", "/v1/completions", json=rows, headers=own):
            post(served, headers={"x-request-id": "full"})
        served.wait(lambda: '"left"' in stream.getvalue())
        told = {line["request_id"]: line for line in lines_of(stream) if "status" in line}
    assert {id: line.get("reason") for id, line in told.items()} == {
        "slow": "slow reader", "left": "cancelled", "full": "queue full",
    }  # fmt: skip
    assert told["full"]["status"] == 503


def test_requests_of_a_socket_have_lines_of_their_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served, logged(monkeypatch, log_format="json") as stream:
        with served.websocket(additional_headers={"x-request-id": "sock"}) as ws:
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

    from foredraft.serve.metrics import Tracing

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


def test_an_unread_stream_of_errors_loses_only_lines(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "foredraft.json"
DRAFTED: dict[str, Any] = {
    "prompt": "def f(n):\n",
    "temperature": 0,
    "ignore_eos": True,
    "drafter": "draft-model",
}


def test_a_request_counts_once_and_a_sample_once(llm: LLM) -> None:
    with serving(llm) as served:
        body = {**DRAFTED, "prompt": ["def f(n):\n", "class A:\n"], "n": 3, "max_tokens": 7}
        usage = served.client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 6 * 7
        assert served.metric("foredraft_prompt_tokens_total") == usage["prompt_tokens"]
        assert served.metric("foredraft_generation_tokens_total") == 6 * 7
        assert served.metric("foredraft_time_to_first_token_seconds_count") == 1
        assert served.metric("foredraft_time_per_output_token_seconds_count") == 6
        assert served.finished("length") == 6
        # a prompt that is only scored is read, too
        served.client.post("/v1/completions", json={**DRAFTED, "max_tokens": 0, "echo": True, "logprobs": 1})
        assert served.metric("foredraft_prompt_tokens_total") > usage["prompt_tokens"]
        assert served.metric("foredraft_time_to_first_token_seconds_count") == 1


def test_accepted_tokens_add_up_by_position(llm: LLM) -> None:
    with serving(llm) as served:
        found = served.client.post("/v1/completions", json={**DRAFTED, "max_tokens": 60}).json()
        drafting = found["metrics"]["speculative_decoding"]
        assert served.metric("foredraft_draft_tokens_total") == drafting["num_draft_tokens"] > 0
        assert served.metric("foredraft_accepted_tokens_total") == drafting["num_accepted_tokens"] > 0
        assert served.metric("foredraft_drafts_total") == drafting["num_spec_steps"]
        by_position = [
            served.metric(f'foredraft_accepted_tokens_by_position_total{{position="{place}"}}')
            for place in range(len(drafting["acceptance_histogram"]))
        ]
        assert by_position == drafting["acceptance_histogram"]


def test_refusals_are_counted_by_reason(llm: LLM) -> None:
    with serving(llm, max_body=2000) as served:
        post = served.client.post
        assert post("/v1/completions", json={**DRAFTED, "temperature": -1}).status_code == 400
        assert post("/v1/completions", json={**DRAFTED, "model": "nope"}).status_code == 404
        assert post("/v1/completions", content=b"x" * 3000).status_code == 413
        served.state.drain()
        refused = post("/v1/completions", json=DRAFTED)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        for reason in ("invalid", "not found", "body too large", "draining"):
            assert served.metric(f'foredraft_requests_refused_total{{reason="{reason}"}}') == 1, reason
        assert served.metric("foredraft_requests_refused_total") == 4
        assert served.client.get("/health").json()["error"]["code"] == "draining"


def test_every_name_on_the_dashboard_is_a_metric(llm: LLM) -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    names = {name for query in queries for name in re.findall(r"\bforedraft_\w+", query)}
    with serving(llm) as served:
        served.client.post("/v1/completions", json={**DRAFTED, "max_tokens": 40})
        served.client.post("/v1/completions", json={**DRAFTED, "temperature": -1})
        lines = served.client.get("/metrics").text.splitlines()
    metrics = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    assert len(names) > 12 and names <= metrics, names - metrics
    shown = {re.sub("_(bucket|total)$", "", name) for name in names}
    own = {re.sub("_(bucket|total|count|sum|created)$", "", name) for name in metrics}
    assert own == shown, own ^ shown  # the dashboard leaves nothing out
    assert all(query.count("(") == query.count(")") for query in queries)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in board["panels"]})
