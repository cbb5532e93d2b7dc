"""Attacks on the server itself: large bodies, endless heads, connections that say nothing, sockets that do not read.

The relations that hold on any machine are asked for always; those of time with the mark `slow`, on an idle one.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

pytest.importorskip("fastapi")

from tests.attack.victim import STREAM, Seen, Victim, victim
from tests.support.raw import PING, TEXT, RawClient, frame, request_bytes, request_from
from tests.support.serving import chat_model

OPTIONS = (
    "--head-seconds",
    "1",
    "--body-seconds",
    "1",
    "--max-connections-per-address",
    "40",
    "--slow-reader-seconds",
    "1",
    "--max-body",
    str(8 << 20),
    "--max-bodies",
    str(10 << 20),
)
MIB = 1 << 20
TRIES = 3  # an attack that stalls the server does so each time; another program on the machine, now and then
ONE_CALL_A_TURN = (
    "{% for message in messages %}{% if message.tool_calls and message.tool_calls | length > 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    model = chat_model(tmp_path_factory.mktemp("chat") / "demo")
    (model / "chat_template.jinja").write_text(ONE_CALL_A_TURN)
    with victim("--model", str(model), *OPTIONS) as found:
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
            answer = answer_of(raw.socket)
            assert b" 408 " in answer and (b"--body" if b"{" in begin else b"--head") in answer


def opened_from(address: str, url: str, stack: ExitStack) -> socket.socket:
    """Open a connection from an address of this machine; the stack closes it."""
    made = stack.enter_context(socket.socket())
    made.settimeout(20)
    made.bind((address, 0))
    made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return made


def too_many_connections(url: str) -> None:
    with ExitStack() as stack:  # the victim has another address
        opened = [opened_from("127.0.0.2", url, stack) for _ in range(60)]
        answers = [answer_of(each) for each in opened]
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
    with RawClient(url) as raw:  # and without reading a reply
        raw.socket.settimeout(2)
        sent = 0
        with suppress(ConnectionError, TimeoutError):
            while sent < 64 * MIB:
                sent += raw.socket.send(one * 1000)
        assert sent < 32 * MIB  # what the kernel takes; the server has stopped reading


def large_bodies(url: str) -> None:
    def status(path: str, field: str, part: str, size: int) -> int:
        parts = ",".join([part] * (size // (len(part) + 1)))
        body = f'{{"model": "demo", "{field}": [{parts}]}}'.encode()
        return httpx.post(f"{url}/v1/{path}", content=body, timeout=60).status_code

    for path, field, part in (
        ("chat/completions", "messages", "[]"), ("completions", "prompt", "[1]"), ("completions", "prompt", "1"),
        ("chat/completions", "messages", "{}"), ("completions", "stop", '"a"'),
    ):  # fmt: skip
        assert status(path, field, part, 200_000) == 400
        assert status(path, field, part, 8_000_000) == 413
    text = json.dumps({"prompt": "def add(a, b): return a + b\n" * 30_000}).encode()
    assert httpx.post(f"{url}/tokenize", content=text, timeout=60).json()["count"] > 100_000
    refused = httpx.post(f"{url}/v1/completions", content=b" " * (9 * MIB), timeout=60)
    assert refused.status_code == 413 and "--max-body" in refused.text


def one_large_text(url: str) -> None:
    """Send one text of nearly all that a body may have, to each route that tokenises."""
    text = "The quick brown fox jumps over the lazy dog. " * 186_000
    for path, fields in (
        ("tokenize", {"prompt": text}),
        ("v1/completions", {"model": "demo", "prompt": text}),
        ("v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": text}]}),
        ("detokenize", {"tokens": [300] * 1_000_000}),
    ):
        reply = httpx.post(f"{url}/{path}", json=fields, timeout=120)
        assert reply.status_code == (200 if "tokenize" in path else 400)


def slow_bodies(url: str) -> None:
    """Send all but the end of large bodies; then another address sends one and is served."""
    body = request_bytes({"model": "demo", "prompt": "x", "max_tokens": 1, "user": "y" * MIB})
    with ExitStack() as stack:
        opened = [opened_from("127.0.0.2", url, stack) for _ in range(30)]
        for each in opened:
            with suppress(ConnectionError):
                each.sendall(body[:-9])
        within = {"model": "demo", "prompt": "x", "max_tokens": 1, "user": "y" * MIB}
        assert request_from("127.0.0.9", f"{url}/v1/completions", within).status_code == 200
        answers = [answer_of(each) for each in opened]
    assert any(b" 503 " in each and b"--max-bodies" in each for each in answers)
    assert any(b" 408 " in each for each in answers)


def calls_of_one_id(url: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    calls = {"role": "assistant", "content": None, "tool_calls": [call] * 3500}
    messages = [{"role": "user", "content": "x"}, calls, *[result] * 3500]
    body = {"model": "demo", "messages": messages, "max_tokens": 1}
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400 and "give each an id of its own" in refused.text


def clients_that_leave(url: str) -> None:
    text = request_bytes({"prompt": "def add(a, b): return a + b\n" * 30_000}, path="/tokenize")
    for _ in range(30):
        with RawClient(url) as raw:
            raw.send(text)
            time.sleep(0.05)  # it is read, and the work has begun


def unread_sockets(url: str) -> None:
    """Send failing frames and pings, as many as are allowed, and never read; the server ends the socket."""
    failing = frame(TEXT, b'{"id": "a", "model": "nothing that there is", "prompt": "y"}')
    for one in (failing, frame(PING, b"x" * 100)):
        with RawClient(url) as raw:
            raw.upgrade()
            raw.send(one * 3900)
            with pytest.raises(ConnectionError):
                raw.keep_sending(one)


def fragments(url: str) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    with connect(url.replace("http", "ws") + "/v1/stream", compression=None) as ws:
        ws.send(json.dumps({"id": "a", "model": "x" * 60_000, "prompt": "y"}))
        assert len(str(ws.recv(timeout=20))) < 2000  # a name is not repeated whole

        def send_all() -> None:
            ws.send("x" for _ in range(20_000))
            while True:
                ws.recv(timeout=20)

        with pytest.raises(ConnectionClosed):
            send_all()
        assert ws.close_code == 1008 and "frames a second" in (ws.close_reason or "")


ATTACKS: list[Callable[[str], None]] = [
    endless_heads, halves, too_many_connections, pipelined, large_bodies, calls_of_one_id, clients_that_leave,
    unread_sockets, fragments, slow_bodies,
]  # fmt: skip
LONG_ATTACKS = [one_large_text]  # whose work alone takes half a minute


def check_what_is_left(seen: Seen) -> None:
    assert seen.after <= 1.1 * seen.before
    assert seen.threads <= 4  # those of a pool: clients that leave make no more


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_answered_by_a_bound_and_the_others_get_their_texts(
    server: Victim, attack: Callable[[str], None]
) -> None:
    want, _ = server.stream()
    seen = server.beside(lambda: attack(server.url))
    assert seen.text == want
    check_what_is_left(seen)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS + LONG_ATTACKS, ids=lambda attack: attack.__name__)
def test_the_figures_of_an_attack(server: Victim, attack: Callable[[str], None]) -> None:
    def honest() -> None:
        for _ in range(4):
            httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False}, timeout=60)

    for left in reversed(range(TRIES)):
        usual = server.beside(honest)
        seen = server.beside(lambda: attack(server.url))
        print(
            f"{attack.__name__}: gap {usual.gap:.2f} -> {seen.gap:.2f} s, health {usual.health:.2f} -> {seen.health:.2f} s,"
            f" memory {seen.before >> 20} -> {seen.after >> 20} MiB, threads {seen.threads:+}"
        )
        check_what_is_left(seen)
        if seen.gap <= usual.gap + 0.5 and seen.health <= 0.5:
            return
        assert left, "in each of the tries, others waited for the attack"
