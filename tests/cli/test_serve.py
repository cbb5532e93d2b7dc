"""`foredraft serve` as a user runs it: the address, the calls to paste, the end, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Cli
from tests.support.command import started_server
from tests.support.raw import RawClient, request_bytes
from tests.support.running import environment

pytest.importorskip("fastapi")


LONG = {"model": "demo", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.mark.heavy
@pytest.mark.parametrize("keys", [False, True])
def test_the_calls_that_it_prints_work_as_pasted(keys: bool) -> None:
    with started_server(**({"FOREDRAFT_API_KEY": "wonderland"} if keys else {})) as (_, _, said):
        assert ("put your API key in place of API_KEY" in said) == keys
        for quote in "\"'":
            said = said.replace(f"API_KEY{quote}", f"wonderland{quote}")
        _, call, snippet = said.split("\n\n")
        run = {"capture_output": True, "text": True, "timeout": 120}
        if shutil.which("curl"):
            out = subprocess.run(["sh", "-c", call], **run).stdout
            assert out.count("data: {") > 2 and out.endswith("data: [DONE]\n\n"), out
        found = subprocess.run([sys.executable, "-c", snippet], env=environment(), **run)
        # the text is drawn, and may come to its end
        assert re.search("finish_reason='(length|stop)'", found.stdout), found.stderr


def await_metric(address: str, line: str) -> None:
    while line not in httpx.get(f"{address}/metrics").text:
        pass


@pytest.mark.heavy
def test_a_signal_lets_every_kind_of_request_finish() -> None:
    """A stream, a reply in one piece, a request of a socket, and one that waits for a row of the batch."""
    from websockets.sync.client import connect

    with started_server("--max-batch", "2") as (process, address, _), ThreadPoolExecutor() as pool:
        url, body = f"{address}/v1/completions", {**LONG, "max_tokens": 200}

        def whole() -> str:
            found = httpx.post(url, json=body, timeout=60).json()
            return str(found["choices"][0]["text"])

        def over_a_socket() -> str:
            text = ""
            with connect(address.replace("http", "ws") + "/v1/stream") as ws:
                ws.send(json.dumps({**body, "id": "a"}))
                while "done" not in (frame := json.loads(ws.recv(timeout=60))):
                    text += frame["chunk"]["choices"][0]["text"]
            assert frame["reason"] == "finished"
            return text

        want = whole()
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            others = [pool.submit(call) for call in (whole, over_a_socket, over_a_socket, whole)]
            await_metric(address, "foredraft_requests_waiting 3.0")
            os.kill(process.pid, signal.SIGINT)
            while httpx.get(f"{address}/health").status_code != 503:  # it says so while it drains
                pass
            assert httpx.post(url, json=body).status_code == 503
            assert "data: [DONE]" in list(lines)
        assert [other.result() for other in others] == [want] * 4
        assert process.wait(20) == 0


@pytest.mark.heavy
def test_requests_that_last_longer_than_the_drain_end_with_an_error() -> None:
    with (
        started_server("--max-batch", "1", "--drain-seconds", "0.2") as (process, address, _),
        ThreadPoolExecutor() as pool,
    ):
        url, body = f"{address}/v1/completions", {**LONG, "n": 8}
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            waiting = pool.submit(httpx.post, url, json=body, timeout=60)
            await_metric(address, "foredraft_requests_waiting 15.0")
            os.kill(process.pid, signal.SIGTERM)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error[6:])["error"]["message"] == "the server is shutting down"
        assert done == "data: [DONE]"
        assert waiting.result().status_code == 503
        assert process.wait(20) == 0


LOADING = """
import atexit, os, sys, time
from foredraft import loading
from foredraft.cli import main

def load(*_, **__):
    print("loading", file=sys.stderr, flush=True)
    time.sleep(600)

loading.load_for = load
atexit.register(lambda: os._exit(7))  # Python's own exit may abort in the libraries that a load uses
main(["serve", "--port", "0"])
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment()
    )


@pytest.mark.heavy
def test_a_signal_ends_a_server_that_is_still_loading() -> None:
    started = {sign: start(LOADING) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        for sign, process in started.items():
            assert process.stderr is not None and process.stderr.readline() == "loading\n"
            os.kill(process.pid, sign)
            assert process.wait(30) == 0
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


WORKING = """
import sys, time
from foredraft.cli import main
from foredraft.serve.tokens import TokenizeRequest

def answer(self, model):
    print("at work", file=sys.stderr, flush=True)
    time.sleep(600)

TokenizeRequest.answer = answer
main(["serve", "--port", "0", "--policy", "fixed"])
"""


@pytest.mark.heavy
def test_a_second_signal_ends_the_process_though_a_thread_works() -> None:
    with start(WORKING) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "print(" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            url = "http://" + said.partition("http://")[2].split()[0]
            with RawClient(url) as raw:
                raw.send(request_bytes({"prompt": "x"}, path="/tokenize"))
                while process.stderr.readline() != "at work\n":
                    pass
                os.kill(process.pid, signal.SIGTERM)
                time.sleep(0.5)
                assert process.poll() is None
                os.kill(process.pid, signal.SIGTERM)
                assert process.wait(1.5) == 0  # before the time that last words have
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--port 0 --model /nowhere", "/nowhere"),
        ("--port 99999", "--port is 99999, cannot be listened on at 127.0.0.1"),
        ("--port -1", "--port is -1; give 0 or more"),
        ("--port 0 --max-queued -1", "--max-queued is -1; give 0 or more"),
        ("--port 0 --drain-seconds 0", "--drain-seconds is 0.0; give seconds, above 0"),
        ("--port 0 --max-unread 0", "--max-unread is 0; give 1 or more"),
        ("--port 0 --api-key-file /nowhere", "--api-key-file is '/nowhere', which cannot be read"),
    ],
)
def test_a_wrong_option_is_refused(line: str, says: str, cli: Cli) -> None:
    assert says in cli.refused(f"serve {line}")


def test_a_port_in_use_is_named(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = cli.refused("serve --port", port)
    assert f"--port is {port}, cannot be listened on at 127.0.0.1 (Address already in use)" in told


def test_the_guide_names_every_path() -> None:
    from foredraft.serve.app import create_app
    from foredraft.serve.settings import Settings

    def load() -> None:
        raise AssertionError

    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    paths = json.loads(json.dumps(create_app(load, Settings()).openapi()))["paths"]  # type: ignore[arg-type]
    for path in paths:
        shown = path.replace("{name}", "{id}")
        assert f"`{shown}`" in guide or f" {shown}`" in guide or path == "/version", path


def test_the_options_of_the_unit_and_of_the_containers_exist(cli: Cli) -> None:
    root = Path(__file__).parents[2]
    unit = (root / "docs" / "systemd" / "foredraft.service").read_text(encoding="utf-8")
    container = (root / "Containerfile").read_text(encoding="utf-8")
    known = set(re.findall(r"--[a-z-]+", cli("serve --help-all").out))
    started = re.findall(r"^ExecStart=(.*)$", unit, re.M) + re.findall(r"^ENTRYPOINT (.*)$", container, re.M)
    used = {option for command in started for option in re.findall(r"--[a-z-]+", command)}
    assert len(started) == 3 and len(used) >= 5 and used <= known
    drain, stop = re.search(r"--drain-seconds (\d+)", unit), re.search(r"^TimeoutStopSec=(\d+)", unit, re.M)
    assert drain and stop and int(stop[1]) >= int(drain[1]) + 10
    stages = container.split("\nFROM ")[2:]
    assert all("USER foredraft" in stage for stage in stages) and "HEALTHCHECK" in container
