"""Connections: how many there may be, in all and by address, and as many as the limit of open files allows."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from foredraft.llm import LLM
from foredraft.serve.app import create_app
from foredraft.serve.bodies import Bodies
from foredraft.serve.connections import RESERVED_FILES, Connections
from foredraft.serve.server import make_server
from foredraft.serve.settings import Settings
from tests.support.command import started_server
from tests.support.raw import request_from
from tests.support.serving import load_chat, serving

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
        served.wait(lambda: request_from("127.0.0.9", f"{served.url}/health").status_code == 200)


def test_a_low_limit_of_open_files_leaves_room_for_other_addresses() -> None:
    most = 24
    shell = ("sh", "-c", f'ulimit -n {RESERVED_FILES + most}; exec "$@"', "sh")
    options = ("--max-connections", "96", "--max-connections-per-address", "48", "--head-seconds", "5")
    with started_server(*options, under=shell) as (_, url, _), ExitStack() as stack:
        said = refusals([opened(stack, url, "127.0.0.2") for _ in range(100)])
        assert sum(b" 429 " in each and ONE in each for each in said) == 100 - most // 2
        assert request_from("127.0.0.3", f"{url}/health").status_code == 200
        said = refusals([opened(stack, url, "127.0.0.4") for _ in range(20)])
        assert sum(b" 503 " in each and ALL in each for each in said) >= 8
        stack.close()
        assert request_from("127.0.0.3", f"{url}/health").status_code == 200


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
        settings = Settings(max_connections=1000, max_connections_per_address=10)
        found = Connections.of(settings, lambda: 0, Bodies(lambda: 0))
        assert (found.most, found.most_of_address) == (1000, 10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1000 + RESERVED_FILES


def test_a_platform_without_limits_of_files_has_those_of_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert Connections.of(Settings(), lambda: 0, Bodies(lambda: 0)).most == Settings().max_connections
    make_server(create_app(lambda: pytest.fail("no model is needed"), Settings()), Settings())
