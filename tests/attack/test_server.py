"""Attacks on the server itself: large bodies, endless heads, connections that say nothing, sockets that do not read.

The relations that hold on any machine are asked for always; the figures with the mark `slow`, on an idle one.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.attack.victim import STREAM, Victim, victim
from tests.support.raw import RawClient

OPTIONS = (
    "--head-seconds",
    "1",
    "--body-seconds",
    "1",
    "--max-connections-per-address",
    "40",
    "--slow-reader-seconds",
    "1",
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Victim]:
    with victim(*OPTIONS) as found:
        yield found


def answer_of(raw: socket.socket) -> bytes:
    """Return all that a server says until it ends a connection."""
    data = b""
    try:
        while part := raw.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data


def endless_heads(url: str) -> None:
    for begin in (
        b"GET /",
        b"GET / HTTP/1.1\r\nhost: ",
        b"GET / HTTP/1.1\r\n",
        b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;",
    ):
        with RawClient(url) as raw:
            sent = 0
            try:
                raw.send(begin)
                for _ in range(64 * 16):
                    raw.send(b"a: b\r\n" * 10_000 if begin.endswith(b"1.1\r\n") else b"a" * (64 << 10))
                    sent += 64 << 10
            except (ConnectionError, TimeoutError):
                pass
            assert sent < 32 * MIB, begin[:40]  # ended by the bound, not by the client


def halves(url: str) -> None:
    begins = (
        b"",
        b"GET / HT",
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{",
    )
    with ExitStack() as stack:
        for begin in begins:
            raw = stack.enter_context(RawClient(url))
            raw.send(begin)
            assert b" 408 " in answer_of(raw.socket)


def too_many_connections(url: str) -> None:
    def opened() -> socket.socket:
        made = stack.enter_context(socket.socket())
        made.settimeout(20)
        made.bind(("127.0.0.2", 0))  # the victim has another address
        made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        return made

    with ExitStack() as stack:
        answers = [answer_of(each) for each in [opened() for _ in range(60)]]
    assert sum(b" 429 " in each and b"--max-connections-per-address" in each for each in answers) == 20
    assert sum(b" 408 " in each for each in answers) == 40


def pipelined(url: str) -> None:
    one = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with RawClient(url, 1 << 20) as raw:
        for _ in range(10):
            raw.send(one * 200)
            got = b""
            while got.count(b"HTTP/1.1 200") < 200:
                got += raw.socket.recv(1 << 16)


def large_bodies(url: str) -> None:
    model = '{"model": "demo", '
    for part, path in (("[]", "messages"), ("[1]", "prompt"), ("{}", "messages")):
        body = f'{model}"{path}": [{",".join([part] * (900_000 // (len(part) + 1)))}]}}'.encode()
        kind = "chat/completions" if path == "messages" else "completions"
        assert httpx.post(f"{url}/v1/{kind}", content=body, timeout=60).status_code == 400
    text = json.dumps({"prompt": "def add(a, b): return a + b\n" * 30_000}).encode()
    assert httpx.post(f"{url}/tokenize", content=text, timeout=60).json()["count"] > 100_000
    refused = httpx.post(f"{url}/v1/completions", content=b" " * (2 * MIB), timeout=60)
    assert refused.status_code == 413 and "--max-body" in refused.text


def unread_sockets(url: str) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    with RawClient(url) as reader:
        key = "GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        reader.send(key.encode())
        name = json.dumps({"id": "a", "model": "x" * 60_000, "prompt": "y"}).encode()
        frame = b"\x81\xfe" + len(name).to_bytes(2, "big") + b"\0\0\0\0" + name
        sent, ended = 0, False
        reader.socket.settimeout(20)
        try:
            for _ in range(2000):
                reader.send(frame)
                sent += 1
                time.sleep(0.0005)
        except (ConnectionError, TimeoutError):
            ended = True
        assert ended or sent == 2000
    with connect(url.replace("http", "ws") + "/v1/stream", compression=None) as ws:
        ws.send(json.dumps({"id": "a", "model": "x" * 60_000, "prompt": "y"}))
        assert len(str(ws.recv(timeout=20))) < 2000  # a name is not repeated whole
        with pytest.raises(ConnectionClosed):
            fragments(ws)
        assert ws.close_code == 1008 and "frames a second" in (ws.close_reason or "")


def fragments(ws: Any) -> None:
    ws.send("x" for _ in range(20_000))
    while True:
        ws.recv(timeout=20)


ATTACKS: list[Callable[[str], None]] = [
    endless_heads, halves, too_many_connections, pipelined, large_bodies, unread_sockets,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_answered_by_a_bound_and_the_others_get_their_texts(
    server: Victim, attack: Callable[[str], None]
) -> None:
    want, _ = server.stream()
    seen = server.beside(lambda: attack(server.url))
    assert seen.text == want
    assert seen.after - seen.before < 200 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_figures_of_an_attack(server: Victim, attack: Callable[[str], None]) -> None:
    def honest() -> None:
        for _ in range(4):
            httpx.post(f"{server.url}/v1/completions", content=request_body(), timeout=60)

    def request_body() -> bytes:
        return json.dumps({**STREAM, "stream": False}).encode()

    usual = server.beside(honest)
    seen = server.beside(lambda: attack(server.url))
    assert seen.gap <= usual.gap + 0.5
    assert seen.health <= 0.5
    assert seen.after <= 1.1 * seen.before
