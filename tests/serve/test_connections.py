"""Connections: how many there may be, and those whose clients do not read."""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from foredraft.llm import LLM
from foredraft.serve import server
from foredraft.serve.app import create_app
from foredraft.serve.generations import Model
from foredraft.serve.limits import RESERVED_FILES, Bodies, Connections
from foredraft.serve.server import make_server
from foredraft.serve.settings import Settings
from tests.support.command import started_server
from tests.support.limits import soft_limit
from tests.support.loaded import engine_of
from tests.support.raw import PING, TEXT, RawClient, frame, opened_from, request_bytes, request_from
from tests.support.serving import Served, events_of, load_chat, serving

ALL, ONE = b"--max-connections)", b"--max-connections-per-address)"


def refusals(connections: list[socket.socket]) -> list[bytes]:
    time.sleep(1)
    said = []
    for each in connections:
        each.setblocking(False)
        try:
            said.append(each.recv(4096))
        except BlockingIOError:
            said.append(b"")
    return said


def test_connections_are_bounded_in_all_and_are_free_again(llm: LLM) -> None:
    with serving(llm, max_connections=6, max_connections_per_address=0) as served:
        served.client.close()  # its connection counts, too
        with ExitStack() as stack:
            said = refusals([opened_from(f"127.0.0.{2 + at % 3}", served.url, stack) for at in range(9)])
            assert said[:6] == [b""] * 6
            assert all(
                b" 503 " in each and ALL in each and b"retry-after" in each.lower() for each in said[6:]
            )
        served.wait(lambda: request_from("127.0.0.9", f"{served.url}/health").status_code == 200)


@pytest.mark.heavy
def test_a_low_limit_of_open_files_leaves_room_for_other_addresses() -> None:
    most = 24
    shell = ("sh", "-c", f'ulimit -n {RESERVED_FILES + most}; exec "$@"', "sh")
    options = ("--max-connections", "96", "--max-connections-per-address", "48", "--head-seconds", "5")
    with started_server(*options, under=shell) as (_, url, _), ExitStack() as stack:
        said = refusals([opened_from("127.0.0.2", url, stack) for _ in range(100)])
        assert sum(b" 429 " in each and ONE in each for each in said) == 100 - most // 2
        assert request_from("127.0.0.3", f"{url}/health").status_code == 200
        said = refusals([opened_from("127.0.0.4", url, stack) for _ in range(20)])
        assert sum(b" 503 " in each and ALL in each for each in said) >= 8
        stack.close()
        assert request_from("127.0.0.3", f"{url}/health").status_code == 200


def test_the_soft_limit_of_open_files_is_raised() -> None:
    with soft_limit(resource.RLIMIT_NOFILE, 512):
        settings = Settings(max_connections=1000, max_connections_per_address=10)
        found = Connections(settings, lambda: 0, Bodies(lambda: 0))
        assert (found.most, found.most_of_address) == (1000, 10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000 + RESERVED_FILES


def test_a_platform_without_limits_of_files_has_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert Connections(Settings(), lambda: 0, Bodies(lambda: 0)).most == Settings().max_connections
    make_server(create_app(lambda: pytest.fail("no model is needed"), Settings()), Settings())


# Its stream is larger than all buffers on the way: each token comes with 20 alternatives.
LARGE: dict[str, Any] = {
    "model": "demo", "prompt": "def f(n):\n", "max_tokens": 400, "ignore_eos": True, "temperature": 0,
    "stream": True, "logprobs": 20,
}  # fmt: skip
SMALL = {**LARGE, "max_tokens": 20, "stream": False, "logprobs": None}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=1) as found:
        yield found


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    body = data.split(b"\r\n\r\n", 1)[1]
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return events_of(whole.decode())


def paused(served: Served) -> bool:
    return served.metric("foredraft_requests_paused") > 0


@pytest.mark.heavy
def test_a_slow_reader_pauses_gives_its_row_to_others_and_gets_its_text(llm: LLM) -> None:
    with serving(llm, max_unread=16) as served:
        want = served.client.post("/v1/completions", json={**LARGE, "stream": False}).json()["choices"][0]
        small = served.client.post("/v1/completions", json=SMALL).json()["choices"][0]["text"]
        with RawClient(served.url) as slow:
            slow.send(request_bytes(LARGE))
            served.wait(lambda: paused(served))
            tokens = len(engine_of(llm).rows.sequences[0].new_ids)
            for _ in range(3):  # there is one row, and the slow request has it
                other = served.client.post("/v1/completions", json=SMALL)
                assert other.json()["choices"][0]["text"] == small
            assert paused(served) and served.metric("foredraft_requests_running") == 0
            [parked] = engine_of(llm).scheduler.waiting
            assert len(parked.new_ids) == tokens < 400
            chunks = chunks_of(slow.rest())
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == want["text"]
        scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        told = [score for each in scores for score in each["token_logprobs"]]
        assert told == want["logprobs"]["token_logprobs"]
        assert max(len(each["tokens"]) for each in scores) > 16  # what was unread became one chunk
        served.wait(served.idle)
        assert served.metric("foredraft_requests_refused_total") == 0


@pytest.mark.heavy
@pytest.mark.parametrize("kernel", [False, True])
def test_a_reader_that_never_takes_is_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:  # it ends connections too late for this test
        monkeypatch.setattr(server, "SWEEP_SECONDS", 600.0)
    seen: list[bool] = []
    drop = Model.drop_slow_readers

    def drop_once_paused(self: Model) -> None:
        """Drop none before the pause, which a busy machine may come to later than to the drop."""
        sequences = [*engine_of(llm).rows.sequences, *engine_of(llm).scheduler.waiting]
        if any(each.paused_at is not None for each in sequences):
            seen.append(True)
        if seen:
            drop(self)

    monkeypatch.setattr(Model, "drop_slow_readers", drop_once_paused)
    with serving(llm, max_unread=16, slow_reader_seconds=1.0) as served:
        with RawClient(served.url) as slow:
            slow.send(request_bytes(LARGE))
            served.wait(lambda: bool(seen), 120)  # once it has more than sockets hold
            served.wait(served.idle)
            if not kernel:
                assert served.metric('foredraft_requests_refused_total{reason="slow reader"}') == 1
            model = served.state.ready()
            served.wait(lambda: not model.live)

            port = slow.socket.getsockname()[1]

            def open_ends() -> int:
                return sum(bool(each.raddr) and each.raddr.port == port for each in process.net_connections())

            process = psutil.Process()
            served.wait(lambda: not (kernel and open_ends()), 120)  # the kernel gave the server's end up
        assert served.finished("cancelled") == 1


@pytest.mark.heavy
def test_a_slow_socket_pauses_and_gets_its_text(llm: LLM) -> None:
    with serving(llm, max_unread=16) as served:
        want = served.client.post("/v1/completions", json={**LARGE, "stream": False}).json()["choices"][0]
        raw = RawClient(served.url).socket
        with served.websocket(sock=raw, max_queue=1, compression=None) as ws:
            ws.send(json.dumps({**LARGE, "id": "a"}))
            served.wait(lambda: paused(served))
            assert served.client.post("/v1/completions", json=SMALL).status_code == 200
            text = ""
            while "done" not in (frame := json.loads(ws.recv(timeout=30))):
                text += frame["chunk"]["choices"][0]["text"]
        assert text == want["text"]
        served.wait(served.idle)


def test_a_socket_whose_client_does_not_read_is_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_SECONDS", 600.0)  # the kernel ends connections too late for this test
    with serving(llm, slow_reader_seconds=0.3) as served:
        for one in (frame(TEXT, b"no request, so that an error comes back"), frame(PING, b"x" * 100)):
            with RawClient(served.url) as unread:
                unread.upgrade()
                unread.send(one * 3900)
                with pytest.raises(ConnectionError):
                    unread.keep_sending(one)
