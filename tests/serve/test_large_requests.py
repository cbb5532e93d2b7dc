"""Large requests and bodies: what they may have, where their work is done, what they hold, and what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from starlette.websockets import WebSocket

from foredraft.llm import LLM
from foredraft.model.tokenizer import Tokenizer
from foredraft.serve import app, offload, tokens
from foredraft.serve.bodies import MORE_BODIES, json_object
from foredraft.serve.limits import Bodies
from foredraft.serve.logs import RequestRecord
from foredraft.serve.problems import Problem
from foredraft.serve.requests import CompletionRequest
from foredraft.serve.streaming import MAX_OPEN, Socket
from foredraft.serve.tokens import TokenizeRequest
from tests.support.raw import PING, TEXT, RawClient, frame, request_bytes, request_from
from tests.support.serving import Served, serving

LISTS = ",".join(["[]"] * 20_000)
MANY = ",".join(['{"role": "user", "content": "x"}'] * 20_000)


@contextmanager
def nothing_to_collect(served: Served) -> Iterator[None]:
    """Assert that no frame of a function stays in a circle, which only a collection of garbage frees."""
    served.client.get("/health")
    gc.collect()
    gc.disable()
    try:
        yield
        served.client.get("/health")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [each.f_code.co_qualname for each in gc.garbage if hasattr(each, "f_code")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


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
def test_a_request_that_is_refused_leaves_nothing_to_collect(served: Served, path: str, body: str) -> None:
    with nothing_to_collect(served):
        refused = served.client.post(f"/v1/{path}", content=f'{{"model": "demo", {body}}}')
        assert refused.status_code == 400


@pytest.mark.parametrize("frame", [f'{{"id": "a", "model": "demo", "messages": [{MANY}]}}', f"[{MANY}"])
def test_a_request_of_a_socket_that_is_refused_leaves_nothing_to_collect(served: Served, frame: str) -> None:
    with served.websocket() as ws, nothing_to_collect(served):
        ws.send(frame)
        assert "error" in json.loads(ws.recv(timeout=60))
        assert frame.startswith("[") or json.loads(ws.recv(timeout=60))["done"]


@pytest.mark.parametrize("settings", [{"body_seconds": 0.5}, {"max_bodies": 250_000}, {}], ids=str)
def test_a_body_that_breaks_off_or_finds_no_room_leaves_nothing(llm: LLM, settings: dict[str, Any]) -> None:
    begun = request_bytes({"model": "demo", "prompt": "x" * 200_000})[:-9]
    with serving(llm, **settings) as served, nothing_to_collect(served):
        with RawClient(served.url) as raw, RawClient(served.url) as other:
            raw.send(begun)
            served.wait(lambda: served.state.bodies.total > 190_000)
            if settings:
                other.send(begun)
                other.socket.recv(1 << 16)  # 408, or 503
        served.wait(lambda: served.state.bodies.total == 0)


PARTS = {  # a field, an item of its list, and how many
    "lists": ("prompt", "[1]", 70_000),
    "objects": ("messages", "{}", 70_000),
    "keys": ("prompt", '{"a":1,"b":[]}', 25_000),
    "values": ("prompt", "1", 270_000),
    "strings with marks": ("a", r'{"}":"\\","\"":"\\\""}', 25_000),
}


@pytest.mark.parametrize("kind", PARTS)
def test_parts_are_bounded_before_parsing(served: Served, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    parsed, loads = list[int](), json.loads
    monkeypatch.setattr(json, "loads", lambda text, **more: parsed.append(len(text)) or loads(text, **more))
    field, part, number = PARTS[kind]
    body = f'{{"model": "demo", "prompt": "\\\\", "{field}": [{",".join([part] * number)}]}}'
    refused = served.client.post("/v1/completions", content=body)
    assert refused.status_code == 413 and not any(size > 100_000 for size in parsed)
    assert "--max-body" in refused.json()["error"]["message"]


def test_marks_within_strings_are_no_parts(served: Served) -> None:
    body = json.dumps({"model": "demo", "prompt": '[{"a": 1, \\' * 30_000})
    refused = served.client.post("/v1/completions", content=body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    over = served.client.post("/v1/completions", content=body[:-1] + ",[]" * 70_000 + "}")
    assert over.status_code == 413


def test_large_requests_take_turns_though_clients_leave(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most, parsed, go_on = [0], [0], list[int](), threading.Event()
    real = TokenizeRequest.answer

    def answer(self: TokenizeRequest, model: Any) -> Any:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        go_on.wait(60)
        at_work[0] -= 1
        return real(self, model)

    def parse(*given: Any) -> Any:
        parsed.append(len(given[0]))
        return json_object(*given)

    monkeypatch.setattr(TokenizeRequest, "answer", answer)
    monkeypatch.setattr(app, "json_object", parse)
    large = request_bytes({"prompt": "x" * (offload.LARGE + 1)}, path="/tokenize")
    with serving(llm) as served:
        try:
            with ExitStack() as clients:
                for number in range(6):
                    clients.enter_context(RawClient(served.url)).send(large)
                    served.wait(partial(lambda n: at_work[0] == n, min(number + 1, offload.AT_ONCE)))
                served.wait(lambda: served.state.bodies.total >= 6 * offload.LARGE)
            assert served.client.post("/detokenize", json={"tokens": [5]}).status_code == 200  # a small one
            # the others have left
            served.wait(lambda: served.state.bodies.total <= offload.AT_ONCE * len(large))
        finally:
            go_on.set()
        served.wait(lambda: at_work[0] == 0)
        assert served.client.post("/tokenize", json={"prompt": "x" * (offload.LARGE + 1)}).status_code == 200
        assert most[0] == offload.AT_ONCE
        assert sum(size > offload.LARGE for size in parsed) == offload.AT_ONCE + 1, "those that waited began"


def home_of(served: Served) -> int:
    async def found() -> int:
        return threading.get_ident()

    loop = served.state.ready().loop
    return asyncio.run_coroutine_threadsafe(found(), loop).result(10)


def body(size: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": "x" * size, "temperature": -1}


@pytest.mark.parametrize(
    ("owner", "work", "path", "body", "apart"),
    [
        (json, "loads", "/v1/completions", body(9), False),
        (json, "loads", "/v1/completions", body(offload.LARGE), True),
        (CompletionRequest, "model_validate", "/v1/completions", body(9), False),
        (CompletionRequest, "model_validate", "/v1/completions", body(offload.LARGE), True),
        (Tokenizer, "encode", "/tokenize", {"prompt": "x"}, True),
        (Tokenizer, "detokenizer", "/detokenize", {"tokens": [5]}, True),
    ],
    ids=["parse", "parse large", "check", "check large", "tokenize", "detokenize"],
)
def test_long_work_is_done_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, owner: Any, work: str, path: str, body: Any, apart: bool
) -> None:
    threads, real = list[int](), getattr(owner, work)
    note = lambda *args, **more: threads.append(threading.get_ident()) or real(*args, **more)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(owner, work, note)
        assert served.client.post(path, json=body).status_code in (200, 400)
    assert {thread != home_of(served) for thread in threads} == {apart}


def test_the_reply_of_tokenize_is_written_beside_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
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
        for over in (b" " * ((1 << 20) + 1), iter([b" " * (1 << 19)] * 3)):  # whole, and in chunks
            assert served.client.post("/v1/completions", content=over).status_code == 413
        assert served.client.post("/v1/completions", content=b" " * (1 << 20)).status_code == 400
        monkeypatch.setattr(llm, "max_length", 100_000)
        assert served.client.post("/v1/completions", content=b" " * 3_200_000).status_code == 400
        assert served.client.post("/v1/completions", content=b" " * 3_300_000).status_code == 413


SMALL: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 3, "temperature": 0}
LONG: dict[str, Any] = {**SMALL, "max_tokens": 200, "ignore_eos": True}
LARGE = request_bytes({**SMALL, "user": "y" * 100_000})
FRAGMENT = 0x01  # first byte of the first frame of a text that has more


def read_until(raw: RawClient, end: bytes) -> bytes:
    data = b""
    while end not in data:
        part = raw.socket.recv(1 << 16)
        assert part, data
        data += part
    return data


def long_frame(first: int, size: int) -> bytes:
    return bytes([first, 0x80 | 126]) + size.to_bytes(2) + b"\0\0\0\0" + b"x" * size


def test_bodies_are_bounded_in_all_and_other_addresses_still_send_theirs(llm: LLM) -> None:
    with serving(llm, max_bodies=250_000) as served, ExitStack() as stack:
        first, second, third = (stack.enter_context(RawClient(served.url)) for _ in range(3))
        first.send(LARGE[:-10])
        second.send(LARGE[:-10])
        served.wait(lambda: served.state.bodies.total > 200_000)
        third.send(LARGE[:-10])
        assert b" 503 " in (said := read_until(third, b"--max-bodies")) and b"retry-after" in said.lower()
        body = {**SMALL, "user": "y" * 50_000}
        assert request_from("127.0.0.9", f"{served.url}/v1/completions", body).status_code == 200
        first.send(LARGE[-10:])
        assert b" 200 OK" in read_until(first, b"usage")
        served.wait(lambda: served.state.bodies.total < 150_000)
        stack.close()
        served.wait(lambda: served.state.bodies.total == 0)


def test_the_bound_follows_from_the_largest_body_and_the_rows_and_one_body_may_exceed_it(llm: LLM) -> None:
    with serving(llm) as served:
        assert served.state.most_of_bodies == (MORE_BODIES + 4) * served.state.most_body
    with serving(llm, max_bodies=7) as served:
        assert served.client.post("/v1/completions", json=SMALL).status_code == 200


def test_a_body_is_held_until_its_request_is_answered(llm: LLM) -> None:
    with serving(llm) as served, RawClient(served.url) as whole, RawClient(served.url) as stream:
        whole.send(request_bytes(LONG))
        served.wait(lambda: not served.idle())
        assert served.state.bodies.total == len(json.dumps(LONG))
        read_until(whole, b"usage")
        assert served.state.bodies.total == 0
        stream.send(request_bytes({**LONG, "stream": True}))
        read_until(stream, b"data: ")
        assert not served.idle() and served.state.bodies.total == 0


def test_messages_of_sockets_count_as_far_as_they_have_come(llm: LLM) -> None:
    with serving(llm, max_bodies=100_000) as served, ExitStack() as stack:
        bodies = served.state.bodies
        unfinished, cut, over = (stack.enter_context(RawClient(served.url)) for _ in range(3))
        for each in (unfinished, cut, over):
            each.upgrade()
        unfinished.send(long_frame(FRAGMENT, 30_000) + frame(0, b"x" * 100) + frame(PING, b""))
        served.wait(lambda: bodies.total == 30_100)
        cut.send(long_frame(TEXT, 60_000)[:-10_000])
        served.wait(lambda: bodies.total == 30_100 + 50_000)
        over.send(long_frame(TEXT, 60_000)[:-1])
        said = read_until(over, b"--max-bodies")
        assert (1013).to_bytes(2) in said
        served.wait(lambda: bodies.total == 80_100)
        cut.socket.close()
        served.wait(lambda: bodies.total == 30_100)
        unfinished.send(frame(0x80, b"]"))  # its end: an error comes back, and nothing is held
        read_until(unfinished, b"not JSON")
        for _ in range(50):
            unfinished.send(
                frame(TEXT, b"no JSON") * 5 + frame(PING, b"x" * 90) + frame(TEXT, b"x" * 50)[:20]
            )
            served.wait(lambda: bodies.total == 20 - 6)  # the head of the frame is read already
            unfinished.send(frame(TEXT, b"x" * 50)[20:])
        served.wait(lambda: bodies.total == 0)


def test_requests_of_sockets_are_held_until_they_are_answered(llm: LLM) -> None:
    with serving(llm) as served, ExitStack() as stack:
        rows = request_bytes({**LONG, "stream": True, "n": 4})  # has all of them
        stack.enter_context(RawClient(served.url)).send(rows)
        served.wait(lambda: served.metric("foredraft_requests_running") == 4)
        with served.websocket() as ws:
            ws.send(text := json.dumps({**LONG, "max_tokens": 12, "id": "a", "user": "y" * 5000}))
            served.wait(lambda: served.state.bodies.total == len(text))
            stack.close()
            assert "chunk" in json.loads(ws.recv(timeout=30))
            assert served.state.bodies.total == 0
            served.wait(served.idle)


async def fake_socket(receive: Any, send: Any) -> WebSocket:
    socket = WebSocket({"type": "websocket", "path": "/v1/stream", "headers": []}, receive, send)
    await socket.accept()
    return socket


def test_a_socket_takes_no_frames_while_endings_wait_that_the_client_does_not_read() -> None:
    frames, sent, reads = 0, list[dict[str, Any]](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal frames
        frames += frames <= 500
        if frames == 1:
            return {"type": "websocket.connect"}
        await asyncio.sleep(0 if frames <= 500 else 600)  # earlier requests fail meanwhile
        return {"type": "websocket.receive", "text": json.dumps({"id": str(frames)})}

    async def send(message: Any) -> None:
        if message["type"] != "websocket.accept":
            await reads.wait()
            sent.append(json.loads(message["text"]))

    async def fail(*_: Any) -> None:
        raise Problem(404, "there is no such model")

    async def run() -> None:
        socket = Socket(await fake_socket(receive, send), fail, 1000, lambda _: None, Bodies(lambda: 1000))
        served = asyncio.create_task(socket.serve())
        for _ in range(4000):
            await asyncio.sleep(0)
        assert MAX_OPEN <= frames <= MAX_OPEN + 8
        reads.set()
        while frames <= 500 or len(sent) < 998:
            await asyncio.sleep(0)
        served.cancel()

    asyncio.run(run())
    assert [each["id"] for each in sent if "done" in each] == [str(at) for at in range(2, 501)]


def test_a_client_that_leaves_while_a_chunk_is_sent_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    records, left = list[RequestRecord](), asyncio.Event()
    frames = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": '{"id": "a"}'}]

    async def receive() -> dict[str, Any]:
        if frames:
            return frames.pop(0)
        await left.wait()
        return {"type": "websocket.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "websocket.send":
            raise OSError("the client has gone")

    async def answer(_: Any, send: Any) -> None:
        await send({"text": "x"})

    def over(record: RequestRecord) -> None:
        records.append(record)
        left.set()

    async def run() -> None:
        await Socket(await fake_socket(receive, send), answer, 1000, over, Bodies(lambda: 1000)).serve()

    asyncio.run(run())
    assert [record.status for record in records] == [499] and not caplog.messages
