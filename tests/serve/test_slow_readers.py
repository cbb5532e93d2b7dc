"""Slow readers, by raw connections: their chunks grow, then they pause, then they are dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from foredraft.llm import LLM
from foredraft.serve import server
from foredraft.serve.generations import Generations
from tests.support.loaded import engine_of
from tests.support.raw import PING, TEXT, RawClient, frame, request_bytes
from tests.support.serving import Served, load_chat, serving

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
    """Return the chunks of a stream that came as HTTP chunks."""
    body = data.split(b"\r\n\r\n", 1)[1]
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return [json.loads(event) for event in re.findall(r"data: (\{.*\})\n\n", whole.decode())]


def paused(served: Served) -> bool:
    return served.metric("foredraft_requests_paused") > 0


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
        assert [score for each in scores for score in each["token_logprobs"]] == want["logprobs"][
            "token_logprobs"
        ]
        assert max(len(each["tokens"]) for each in scores) > 16  # what was unread became one chunk
        served.wait(served.idle)
        assert served.metric("foredraft_requests_refused_total") == 0


@pytest.mark.parametrize("kernel", [False, True])
def test_a_reader_that_never_takes_is_dropped_and_the_connection_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:  # it ends connections too late for this test
        monkeypatch.setattr(server, "SWEEP_SECONDS", 600.0)
    seen: list[bool] = []
    drop = Generations.drop_slow_readers

    def drop_once_paused(self: Generations) -> None:
        """Drop none before the pause, which a busy machine may come to later than to the drop."""
        sequences = [*engine_of(llm).rows.sequences, *engine_of(llm).scheduler.waiting]
        if any(each.paused_at is not None for each in sequences):
            seen.append(True)
        if seen:
            drop(self)

    monkeypatch.setattr(Generations, "drop_slow_readers", drop_once_paused)
    with serving(llm, max_unread=16, slow_reader_seconds=1.0) as served:
        with RawClient(served.url) as slow:
            slow.send(request_bytes(LARGE))
            served.wait(lambda: bool(seen))
            served.wait(served.idle)
            if not kernel:
                assert served.metric('foredraft_requests_refused_total{reason="slow reader"}') == 1
            model = served.state.ready()
            served.wait(lambda: not model.generations.live)

            port = slow.socket.getsockname()[1]

            def open_ends() -> int:
                return sum(bool(each.raddr) and each.raddr.port == port for each in process.net_connections())

            process = psutil.Process()
            served.wait(lambda: not (kernel and open_ends()))  # the kernel gave the server's end up
        assert served.finished("cancelled") == 1


def test_a_slow_socket_pauses_and_gets_its_text(llm: LLM) -> None:
    from websockets.sync.client import connect

    with serving(llm, max_unread=16) as served:
        want = served.client.post("/v1/completions", json={**LARGE, "stream": False}).json()["choices"][0]
        with (
            RawClient(served.url) as raw,
            connect(
                served.url.replace("http", "ws") + "/v1/stream",
                sock=raw.socket,
                max_queue=1,
                compression=None,
            ) as ws,
        ):
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
