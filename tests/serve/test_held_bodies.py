"""Bodies and messages of WebSockets are bounded in all, from when they come until their requests are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.sync.client import connect

from foredraft.llm import LLM
from foredraft.serve.bodies import MORE_BODIES, Bodies
from foredraft.serve.problems import Problem
from foredraft.serve.sockets import MAX_OPEN, Socket
from tests.support.raw import PING, TEXT, RawClient, frame, request_bytes, request_from
from tests.support.serving import load_chat, serving

SMALL: dict[str, Any] = {"model": "demo", "prompt": "x", "max_tokens": 3, "temperature": 0}
LONG: dict[str, Any] = {**SMALL, "max_tokens": 400, "ignore_eos": True}
LARGE = request_bytes({**SMALL, "user": "y" * 100_000})
FRAGMENT = 0x01  # first byte of the first frame of a text that has more


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


def read_until(raw: RawClient, end: bytes) -> bytes:
    """Return what a server says, up to some bytes."""
    data = b""
    while end not in data:
        part = raw.socket.recv(1 << 16)
        assert part, data
        data += part
    return data


def long_frame(first: int, size: int) -> bytes:
    """Return a frame of up to 64 KiB."""
    return bytes([first, 0x80 | 126]) + size.to_bytes(2) + b"\0\0\0\0" + b"x" * size


def test_bodies_are_bounded_in_all_and_other_addresses_still_send_theirs(llm: LLM) -> None:
    with serving(llm, max_bodies=250_000) as served, ExitStack() as stack:
        first, second, third = (stack.enter_context(RawClient(served.url)) for _ in range(3))
        first.send(LARGE[:-10])
        second.send(LARGE[:-10])
        served.wait(lambda: served.state.bodies.held > 200_000)
        third.send(LARGE[:-10])
        assert b" 503 " in (said := read_until(third, b"--max-bodies")) and b"retry-after" in said.lower()
        body = {**SMALL, "user": "y" * 50_000}
        assert request_from("127.0.0.9", f"{served.url}/v1/completions", body).status_code == 200
        first.send(LARGE[-10:])
        assert b" 200 OK" in read_until(first, b"usage")
        served.wait(lambda: served.state.bodies.held < 150_000)
        stack.close()
        served.wait(lambda: served.state.bodies.held == 0)


def test_one_body_may_have_more_than_all_may_have(llm: LLM) -> None:
    with serving(llm, max_bodies=1000) as served:
        assert served.client.post("/v1/completions", json={**SMALL, "user": "y" * 9000}).status_code == 200


def test_the_bound_follows_from_the_largest_body_and_the_rows(llm: LLM) -> None:
    with serving(llm) as served:
        state = served.state
        assert state.most_of_bodies == (MORE_BODIES + 2) * state.most_body
    with serving(llm, max_bodies=7) as served:
        assert served.state.most_of_bodies == 7


def test_a_body_is_held_until_its_request_is_answered(llm: LLM) -> None:
    with serving(llm) as served, RawClient(served.url) as whole, RawClient(served.url) as stream:
        whole.send(request_bytes(LONG))
        served.wait(lambda: not served.idle())
        assert served.state.bodies.held == len(json.dumps(LONG))
        read_until(whole, b"usage")
        assert served.state.bodies.held == 0
        stream.send(request_bytes({**LONG, "stream": True}))
        read_until(stream, b"data: ")
        assert not served.idle() and served.state.bodies.held == 0


def test_messages_of_sockets_count_as_far_as_they_have_come(llm: LLM) -> None:
    with serving(llm, max_bodies=100_000) as served, ExitStack() as stack:
        bodies = served.state.bodies
        unfinished, cut, over = (stack.enter_context(RawClient(served.url)) for _ in range(3))
        for each in (unfinished, cut, over):
            each.upgrade()
        unfinished.send(long_frame(FRAGMENT, 30_000) + frame(0, b"x" * 100) + frame(PING, b""))
        served.wait(lambda: bodies.held == 30_100)
        cut.send(long_frame(TEXT, 60_000)[:-10_000])
        served.wait(lambda: bodies.held == 30_100 + 50_000)
        over.send(long_frame(TEXT, 60_000)[:-1])
        said = read_until(over, b"--max-bodies")
        assert (1013).to_bytes(2) in said
        served.wait(lambda: bodies.held == 80_100)
        cut.socket.close()
        served.wait(lambda: bodies.held == 30_100)
        unfinished.send(frame(0x80, b"]"))  # its end: an error comes back, and nothing is held
        read_until(unfinished, b"not JSON")
        for _ in range(50):
            unfinished.send(
                frame(TEXT, b"no JSON") * 5 + frame(PING, b"x" * 90) + frame(TEXT, b"x" * 50)[:20]
            )
            served.wait(lambda: bodies.held == 20 - 6)  # the head of the frame is read already
            unfinished.send(frame(TEXT, b"x" * 50)[20:])
        served.wait(lambda: bodies.held == 0)


def test_requests_of_sockets_are_held_until_they_are_answered(llm: LLM) -> None:
    with serving(llm) as served, ExitStack() as stack:
        for _ in range(2):  # they have the rows
            stack.enter_context(RawClient(served.url)).send(request_bytes({**LONG, "stream": True}))
        served.wait(lambda: served.metric("foredraft_requests_running") == 2)
        with connect(served.url.replace("http", "ws") + "/v1/stream") as ws:
            ws.send(text := json.dumps({**LONG, "id": "a", "user": "y" * 5000}))
            served.wait(lambda: served.state.bodies.held == len(text))
            stack.close()
            assert "chunk" in json.loads(ws.recv(timeout=30))
            assert served.state.bodies.held == 0
            served.wait(served.idle)


def test_a_socket_takes_no_frames_while_endings_wait_that_the_client_does_not_read() -> None:
    frames, sent, reads = 0, list[dict[str, Any]](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal frames
        if not frames:
            frames += 1
            return {"type": "websocket.connect"}
        await asyncio.sleep(0)  # earlier requests fail meanwhile
        if frames > 500:
            await asyncio.sleep(600)
        frames += 1
        return {"type": "websocket.receive", "text": json.dumps({"id": str(frames)})}

    async def send(message: Any) -> None:
        if message["type"] != "websocket.accept":
            await reads.wait()
            sent.append(json.loads(message["text"]))

    async def fail(*_: Any) -> None:
        raise Problem(404, "there is no such model")

    async def run() -> None:
        socket = WebSocket({"type": "websocket", "path": "/v1/stream", "headers": []}, receive, send)
        await socket.accept()
        served = asyncio.create_task(Socket(socket, fail, 1000, lambda _: None, Bodies(lambda: 1000)).serve())
        for _ in range(4000):
            await asyncio.sleep(0)
        assert MAX_OPEN <= frames <= MAX_OPEN + 8
        reads.set()
        while frames <= 500 or len(sent) < 1000:
            await asyncio.sleep(0)
        served.cancel()

    asyncio.run(run())
    assert [each["id"] for each in sent if "done" in each] == [str(2 + at) for at in range(500)]
