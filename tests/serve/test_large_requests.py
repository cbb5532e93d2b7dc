"""Large requests: what they may have, where their work is done, and what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from foredraft.llm import LLM
from foredraft.serve import app, beside, tokens
from foredraft.serve.bodies import json_object
from foredraft.serve.requests import CompletionRequest
from foredraft.serve.tokens import TokenizeRequest
from tests.support.raw import RawClient, request_bytes
from tests.support.serving import Served, load_chat, serving


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


LISTS = ",".join(["[]"] * 20_000)


MANY = ",".join(['{"role": "user", "content": "x"}'] * 20_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", f'"messages": [{MANY}]'),  # too many tokens, found in a thread
        ("chat/completions", f'"messages": [{{}}, {MANY}]'),  # the template refuses each of its forms
        ("completions", f'"prompt": [{LISTS}, 7]'),
        ("completions", f'"prompt": "x", "temperature": -1, "metadata": [{LISTS}]'),
        ("responses", f'"input": [{MANY}]'),
        ("messages", f'"max_tokens": 3, "messages": [{MANY}]'),
        ("chat/completions", f'"messages": [], "tools": [{LISTS}]'),
    ],
)
def test_a_request_that_is_refused_leaves_nothing_to_collect(llm: LLM, path: str, body: str) -> None:
    with serving(llm) as served:
        served.client.get("/health")
        gc.collect()
        gc.disable()
        try:
            assert (
                served.client.post(f"/v1/{path}", content=f'{{"model": "demo", {body}}}').status_code == 400
            )
            assert frames_in_circles() == []
        finally:
            gc.enable()


def test_a_request_of_a_socket_that_is_refused_leaves_nothing_to_collect(llm: LLM) -> None:
    with serving(llm) as served, connect(served.url.replace("http", "ws") + "/v1/stream") as ws:
        for refused in (f'{{"id": "a", "model": "demo", "messages": [{MANY}]}}', f"[{MANY}"):
            gc.collect()
            gc.disable()
            try:
                ws.send(refused)
                assert "error" in json.loads(ws.recv(timeout=20))
                if refused.startswith("{"):
                    assert json.loads(ws.recv(timeout=20))["done"]
                assert frames_in_circles() == []
            finally:
                gc.enable()


def test_a_body_that_breaks_off_or_finds_no_room_leaves_nothing_to_collect(llm: LLM) -> None:
    begun = request_bytes({"model": "demo", "prompt": "x" * 200_000})[:-9]
    for settings in ({"body_seconds": 0.5}, {"max_bodies": 250_000}, {}):
        with serving(llm, **settings) as served:
            served.client.get("/health")
            gc.collect()
            gc.disable()
            try:
                with RawClient(served.url) as raw, RawClient(served.url) as other:
                    raw.send(begun)
                    served.wait(lambda: served.state.bodies.held > 190_000)
                    if settings:
                        other.send(begun)
                        other.socket.recv(1 << 16)  # 408, or 503
                served.wait(lambda: served.state.bodies.held == 0)
                served.client.get("/health")
                assert frames_in_circles() == []
            finally:
                gc.enable()


def frames_in_circles() -> list[str]:
    """Return the functions whose frames only a collection of garbage frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [each.f_code.co_qualname for each in gc.garbage if hasattr(each, "f_code")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


PARTS = {  # a field, an item of its list, and how many
    "lists": ("prompt", "[1]", 70_000),
    "objects": ("messages", "{}", 70_000),
    "keys": ("prompt", '{"a":1,"b":[]}', 25_000),
    "values": ("prompt", "1", 270_000),
    "strings with marks": ("a", r'{"}":"\\","\"":"\\\""}', 25_000),
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_of_a_body_are_bounded_before_it_is_parsed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    parsed: list[int] = []
    loads = json.loads
    with serving(llm) as served:
        monkeypatch.setattr(
            json, "loads", lambda text, **more: parsed.append(len(text)) or loads(text, **more)
        )
        field, part, number = PARTS[kind]
        body = f'{{"model": "demo", "prompt": "\\\\", "{field}": [{",".join([part] * number)}]}}'
        refused = served.client.post("/v1/completions", content=body)
        assert refused.status_code == 413 and not any(size > 100_000 for size in parsed)
        assert "--max-body" in refused.json()["error"]["message"]


def test_marks_within_strings_are_no_parts(llm: LLM) -> None:
    text = '[{"a": 1, \\' * 30_000
    with serving(llm) as served:
        body = json.dumps({"model": "demo", "prompt": text}).encode()
        refused = served.client.post("/v1/completions", content=body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        over = served.client.post(
            "/v1/completions", content=body.replace(b'"}', b'"' + b",[]" * 70_000 + b"}")
        )
        assert over.status_code == 413


def test_large_requests_take_turns_though_their_clients_leave(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, most, parsed, go_on = [0], [0], list[int](), threading.Event()
    real = TokenizeRequest.answer

    def answer(self: TokenizeRequest, model: Any) -> Any:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        go_on.wait(20)
        at_work[0] -= 1
        return real(self, model)

    def parse(*given: Any) -> Any:
        parsed.append(len(given[0]))
        return json_object(*given)

    monkeypatch.setattr(TokenizeRequest, "answer", answer)
    monkeypatch.setattr(app, "json_object", parse)
    large = request_bytes({"prompt": "x" * (beside.LARGE + 1)}, path="/tokenize")
    with serving(llm) as served:
        try:
            for _ in range(6):
                with RawClient(served.url) as raw:
                    raw.send(large)
                    time.sleep(0.1)
            assert most[0] == beside.AT_ONCE
            assert served.client.post("/detokenize", json={"tokens": [5]}).status_code == 200  # a small one
        finally:
            go_on.set()
        served.wait(lambda: at_work[0] == 0)
        assert served.client.post("/tokenize", json={"prompt": "x" * (beside.LARGE + 1)}).status_code == 200
        assert most[0] == beside.AT_ONCE
        large_ones = [size for size in parsed if size > beside.LARGE]
        assert len(large_ones) == beside.AT_ONCE + 1  # those that waited never began


def home_of(served: Served) -> int:
    """Return the thread of the event loop."""

    async def found() -> int:
        return threading.get_ident()

    loop = served.state.ready().generations._loop
    return asyncio.run_coroutine_threadsafe(found(), loop).result(10)


def test_a_large_body_is_parsed_and_checked_beside_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[int]] = {"parse": [], "check": []}

    def watched(kind: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            seen[kind].append(threading.get_ident())
            return real(*args, **more)

        return call

    monkeypatch.setattr(json, "loads", watched("parse", json.loads))
    monkeypatch.setattr(
        CompletionRequest, "model_validate", watched("check", CompletionRequest.model_validate)
    )
    with serving(llm) as served:
        home = home_of(served)
        for size, beside_it in ((9, False), (beside.LARGE, True)):
            seen["parse"].clear()
            seen["check"].clear()
            body = {"model": "demo", "prompt": "x" * size, "temperature": -1}
            served.client.post("/v1/completions", content=json.dumps(body))
            assert [thread != home for thread in seen["parse"]] == [beside_it]
            assert [thread != home for thread in seen["check"]] == [beside_it]


def test_the_reply_of_tokenize_is_written_beside_the_event_loop_piece_by_piece(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    dumps = json.dumps

    def watched(value: Any, **more: Any) -> str:
        written.append((threading.get_ident(), len(value)))
        return dumps(value, **more)

    assert llm.tokenizer is not None
    with serving(llm) as served:
        home = home_of(served)
        for text in ("", "x", "def add(a, b):\n" * 20_000):
            body = dumps({"prompt": text})
            with monkeypatch.context() as patch:
                patch.setattr(json, "dumps", watched)
                reply = served.client.post("/tokenize", content=body)
            ids = llm.tokenizer.encode(text)
            assert reply.json() == {"tokens": ids, "count": len(ids), "max_model_len": llm.max_length}
            assert reply.content == dumps(reply.json(), separators=(",", ":")).encode()
        assert len(ids) > 4 * tokens.PIECE
        assert all(thread != home and size <= tokens.PIECE for thread, size in written if size > 10)


def test_the_limit_of_a_body_follows_from_the_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served:
        assert served.client.post("/v1/completions", content=b" " * ((1 << 20) + 1)).status_code == 413
        assert served.client.post("/v1/completions", content=b" " * (1 << 20)).status_code == 400
        monkeypatch.setattr(llm, "max_length", 100_000)
        assert served.client.post("/v1/completions", content=b" " * 3_200_000).status_code == 400
        assert served.client.post("/v1/completions", content=b" " * 3_300_000).status_code == 413
