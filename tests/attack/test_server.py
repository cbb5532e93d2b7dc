"""Attacks on the server itself, each beside a stream of another client: large bodies, endless heads, silence."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("fastapi")

from foredraft.serve.offload import AT_ONCE
from tests.support.command import started_server
from tests.support.raw import RawClient, request_bytes
from tests.support.serving import chat_model

OPTIONS = [
    *"--head-seconds 1 --body-seconds 3 --max-connections-per-address 40".split(),
    *("--max-body", str(8 << 20)),
]
MIB = 1 << 20
LEAVING = 30  # clients
TRIES = 3  # an attack that stalls the server does so each time; another program on the machine, now and then
ONE_CALL_A_TURN = (
    "{% for message in messages %}{% if message.tool_calls and message.tool_calls | length > 1 %}"
    "{{ raise_exception('single calls only') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
STREAM: dict[str, Any] = {
    "model": "demo", "prompt": "def f(n):\n", "max_tokens": 100, "ignore_eos": True, "temperature": 0,
    "stream": True,
}  # fmt: skip
SETTLING_SECONDS = 4.0  # that a server has to give memory back
TOKENIZING = 2  # threads of the tokenizer's pool, which by itself has one for each CPU


@dataclass(frozen=True, slots=True)
class Seen:
    text: str  # of the victim's last stream
    gap: float  # the longest time between two pieces of the victim's streams, in seconds
    health: float  # the longest time of a GET /health, in seconds
    before: int  # memory of the server before the attack, in bytes
    after: int  # the same after it, the least of the next seconds
    threads: int  # that the server had more at the end of the attack than before


@dataclass(frozen=True, slots=True)
class Victim:
    url: str
    process: psutil.Process

    def stream(self) -> tuple[str, float]:
        text, gap, last = "", 0.0, None
        with httpx.stream("POST", f"{self.url}/v1/completions", json=STREAM, timeout=120) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    now = time.monotonic()
                    gap, last = max(gap, now - (last or now)), now
        return text, gap

    def attacked(self, attack: Callable[[], object]) -> Seen:
        """Run an attack; meanwhile streams follow each other, and /health is asked for."""
        before, threads = self.process.memory_info().rss, self.process.num_threads()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                attack()
            except BaseException as error:
                failed.append(error)

        attacker = threading.Thread(target=run)
        slowest, over = [0.0], threading.Event()
        prober = threading.Thread(target=self._probe, args=(slowest, over))
        attacker.start()
        prober.start()
        text, gap = self.stream()
        while attacker.is_alive():
            text, further = self.stream()
            gap = max(gap, further)
        over.set()
        prober.join()
        if failed:
            raise failed[0]
        threads = self.process.num_threads() - threads
        return Seen(text, gap, slowest[0], before, self._settled_memory(before), threads)

    def _settled_memory(self, before: int) -> int:
        end, least = time.monotonic() + SETTLING_SECONDS, self.process.memory_info().rss
        while least > 1.02 * before and time.monotonic() < end:
            time.sleep(0.1)
            least = min(least, self.process.memory_info().rss)
        return least

    def _probe(self, slowest: list[float], over: threading.Event) -> None:
        with httpx.Client(timeout=120) as client:
            while not over.wait(0.05):
                began = time.monotonic()
                assert client.get(f"{self.url}/health").status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - began)


@contextmanager
def victim(*options: str) -> Iterator[Victim]:
    with started_server(*options, RAYON_NUM_THREADS=str(TOKENIZING)) as (process, url, _):
        # what the first requests cost, also side by side, is no harm of an attack
        side_by_side = {**STREAM, "stream": False, "n": 4}
        assert httpx.post(f"{url}/v1/completions", json=side_by_side, timeout=120).status_code == 200
        yield Victim(url, psutil.Process(process.pid))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    model = chat_model(tmp_path_factory.mktemp("chat") / "demo")
    (model / "chat_template.jinja").write_text(ONE_CALL_A_TURN)
    with victim("--model", str(model), *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def text(server: Victim) -> str:
    return server.stream()[0]


def answer_of(raw: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionError):
        while part := raw.recv(1 << 16):
            data += part
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
            with suppress(ConnectionError, TimeoutError):
                raw.send(begin)
                for _ in range(64 * 16):
                    raw.send(b"a: b\r\n" * 10_000 if begin.endswith(b"1.1\r\n") else b"a" * (64 << 10))
                    sent += 64 << 10
            assert sent < 32 * MIB, begin[:40]  # ended by the bound, not by the client


def halves(url: str) -> None:
    body = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
    for begin in (b"", b"GET / HT", body):
        with RawClient(url) as raw:
            raw.send(begin)
            answer = answer_of(raw.socket)
            assert b" 408 " in answer and (b"--body" if b"{" in begin else b"--head") in answer


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

    for path, field, part in (("chat/completions", "messages", "[]"), ("completions", "prompt", "1")):
        assert status(path, field, part, 200_000) == 400
        assert status(path, field, part, 8_000_000) == 413
    text = json.dumps({"prompt": "def add(a, b): return a + b\n" * 30_000}).encode()
    assert httpx.post(f"{url}/tokenize", content=text, timeout=60).json()["count"] > 100_000
    refused = httpx.post(f"{url}/v1/completions", content=b" " * (9 * MIB), timeout=60)
    assert refused.status_code == 413 and "--max-body" in refused.text


def one_large_text(url: str) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 186_000
    for path, fields in (
        ("tokenize", {"prompt": text}),
        ("v1/completions", {"model": "demo", "prompt": text}),
        ("v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": text}]}),
        ("detokenize", {"tokens": [300] * 1_000_000}),
    ):
        reply = httpx.post(f"{url}/{path}", json=fields, timeout=120)
        assert reply.status_code == (200 if "tokenize" in path else 400)


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
    for _ in range(LEAVING):
        with RawClient(url) as raw:
            raw.send(text)
            time.sleep(0.05)  # it is read, and the work has begun


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
    endless_heads, halves, pipelined, large_bodies, calls_of_one_id, clients_that_leave, fragments,
]  # fmt: skip
LONG_ATTACKS = [one_large_text]  # whose work alone takes half a minute
# Threads of the server's pools: one for each turn of large requests, for a submission of the victim's and one of the
# attacker's, and for the sweep; and the tokenizer's own. Some of them were there before the attack.
MOST_THREADS = AT_ONCE + 2 + 1 + TOKENIZING


def check_what_is_left(seen: Seen) -> None:
    assert seen.after <= 1.1 * seen.before
    assert seen.threads <= MOST_THREADS < LEAVING, "a thread for each client"


@pytest.mark.heavy
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_is_answered_by_a_bound_and_the_others_get_their_texts(
    server: Victim, text: str, attack: Callable[[str], None]
) -> None:
    seen = server.attacked(lambda: attack(server.url))
    assert seen.text == text
    check_what_is_left(seen)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS + LONG_ATTACKS, ids=lambda attack: attack.__name__)
def test_the_figures_of_an_attack(server: Victim, attack: Callable[[str], None]) -> None:
    def honest() -> None:
        for _ in range(4):
            httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False}, timeout=60)

    for left in reversed(range(TRIES)):
        usual = server.attacked(honest)
        seen = server.attacked(lambda: attack(server.url))
        print(
            f"{attack.__name__}: gap {usual.gap:.2f} -> {seen.gap:.2f} s, health {usual.health:.2f} -> {seen.health:.2f} s,"
            f" memory {seen.before >> 20} -> {seen.after >> 20} MiB, threads {seen.threads:+}"
        )
        check_what_is_left(seen)
        if seen.gap <= usual.gap + 0.5 and seen.health <= 0.5:
            return
        assert left, "in each of the tries, others waited for the attack"
