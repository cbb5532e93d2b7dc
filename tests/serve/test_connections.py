"""Connections: how many there may be, in all and by address, and what is left of a request that was refused."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.llm import LLM
from foredraft.serve import beside
from foredraft.serve.app import create_app
from foredraft.serve.connections import RESERVED_FILES, Connections
from foredraft.serve.requests import CompletionRequest
from foredraft.serve.server import make_server
from foredraft.serve.settings import Settings
from foredraft.serve.tokens import TokenizeRequest
from tests.support.command import started_server
from tests.support.raw import RawClient, request_bytes
from tests.support.serving import Served, load_chat, serving

ALL, ONE = b"--max-connections)", b"--max-connections-per-address)"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with load_chat(tmp_path_factory.mktemp("chat"), max_batch=2) as found:
        yield found


def opened(stack: ExitStack, url: str, address: str) -> socket.socket:
    """Open a connection from an address of this machine; the stack closes it."""
    made = stack.enter_context(socket.socket())
    made.settimeout(20)
    made.bind((address, 0))
    made.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return made


def refusals(connections: list[socket.socket]) -> list[bytes]:
    """Return what the server says, within a second, to connections that say nothing."""
    time.sleep(1)
    said = []
    for each in connections:
        each.setblocking(False)
        try:
            said.append(each.recv(4096))
        except BlockingIOError:
            said.append(b"")
    return said


def get_from(url: str, address: str, path: str = "/health", **more: Any) -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=20) as client:
        return client.request("POST" if more else "GET", url + path, **more)


def test_connections_are_bounded_in_all_and_are_free_again(llm: LLM) -> None:
    with serving(llm, max_connections=6, max_connections_per_address=0) as served:
        served.client.close()  # its connection counts, too
        with ExitStack() as stack:
            held = [opened(stack, served.url, f"127.0.0.{2 + place % 3}") for place in range(9)]
            said = refusals(held)
            assert said[:6] == [b""] * 6
            assert all(
                b" 503 " in each and ALL in each and b"retry-after" in each.lower() for each in said[6:]
            )
        served.wait(lambda: get_from(served.url, "127.0.0.9").status_code == 200)


def test_a_low_limit_of_open_files_leaves_room_for_other_addresses() -> None:
    most = 24
    shell = ("sh", "-c", f'ulimit -n {RESERVED_FILES + most}; exec "$@"', "sh")
    options = ("--max-connections", "96", "--max-connections-per-address", "48", "--head-seconds", "5")
    with started_server(*options, under=shell) as (_, url, _), ExitStack() as stack:
        said = refusals([opened(stack, url, "127.0.0.2") for _ in range(100)])
        assert sum(b" 429 " in each and ONE in each for each in said) == 100 - most // 2
        assert get_from(url, "127.0.0.3").status_code == 200
        said = refusals([opened(stack, url, "127.0.0.4") for _ in range(20)])
        assert sum(b" 503 " in each and ALL in each for each in said) >= 8
        stack.close()
        assert get_from(url, "127.0.0.3").status_code == 200


@contextmanager
def limit_of_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_of_open_files_is_raised() -> None:
    with limit_of_files(512):
        found = Connections.of(Settings(max_connections=1000, max_connections_per_address=10), lambda: 0)
        assert (found.most, found.most_of_address) == (1000, 10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000 + RESERVED_FILES


def test_a_platform_without_limits_of_files_has_those_of_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert Connections.of(Settings(), lambda: 0).most == Settings().max_connections
    make_server(create_app(lambda: pytest.fail("no model is needed"), Settings()), Settings())


def test_tokens_and_texts_count_for_one_client(llm: LLM) -> None:
    long = {"model": "demo", "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(llm, max_per_key=1) as served, served.client.stream("POST", "/v1/completions", json=long):
        served.wait(lambda: served.metric("foredraft_requests_running") == 1)
        for address, status in (("127.0.0.1", 429), ("127.0.0.2", 200)):
            for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
                assert get_from(served.url, address, path, json=body).status_code == status


def test_metrics_need_a_key_where_the_server_has_keys(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    with serving(llm, api_key_file=file) as served:
        assert served.client.get("/metrics").status_code == 401
        allowed = served.client.get("/metrics", headers={"authorization": "Bearer secret"})
        assert allowed.status_code == 200 and "foredraft_requests_running" in allowed.text


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
    at_work, most, begun, go_on = [0], [0], [0], threading.Event()
    real = TokenizeRequest.answer

    def answer(self: TokenizeRequest, model: Any) -> Any:
        at_work[0] += 1
        begun[0] += 1
        most[0] = max(most[0], at_work[0])
        go_on.wait(20)
        at_work[0] -= 1
        return real(self, model)

    monkeypatch.setattr(TokenizeRequest, "answer", answer)
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
        assert most[0] == beside.AT_ONCE and begun[0] == beside.AT_ONCE + 1  # those that waited never began


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


def test_the_limit_of_a_body_follows_from_the_context(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as served:
        assert served.client.post("/v1/completions", content=b" " * ((1 << 20) + 1)).status_code == 413
        assert served.client.post("/v1/completions", content=b" " * (1 << 20)).status_code == 400
        monkeypatch.setattr(llm, "max_length", 100_000)
        assert served.client.post("/v1/completions", content=b" " * 3_200_000).status_code == 400
        assert served.client.post("/v1/completions", content=b" " * 3_300_000).status_code == 413
