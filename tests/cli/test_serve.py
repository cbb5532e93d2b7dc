"""`foredraft serve` as a user runs it: the address, the calls to paste, the end, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from foredraft.cli import main
from tests.support.running import environment

pytest.importorskip("fastapi")


def started(*options: str) -> tuple[subprocess.Popen[str], str, str]:
    """Start a server; return it, its address, and all that it said until then."""
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", "--policy", "fixed", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if line.startswith("  print("):
            break
    address = re.search(r"foredraft serves \S+ at (http://127\.0\.0\.1:\d+) ", said)
    assert address, said
    return process, address[1], said


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_the_calls_that_it_prints_work_and_a_signal_ends_it(sign: signal.Signals) -> None:
    process, address, said = started()
    try:
        call = re.search(r"curl -N (\S+) .*\n    -d '(.*)'", said)
        assert call
        events = httpx.post(call[1], content=call[2], timeout=60).text
        assert events.count("data: ") > 2 and events.endswith("data: [DONE]\n\n")
        snippet = said[said.index("  from openai") :].replace("\n  ", "\n").strip()
        found = subprocess.run(
            [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=120, env=environment()
        )
        assert "finish_reason='length'" in found.stdout, found.stderr
        body = {"model": "demo", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(process.pid, sign)
            assert "data: [DONE]" in list(lines)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_ends_it_at_once() -> None:
    process, address, _ = started("--drain-seconds", "600")
    try:
        body = {"model": "demo", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "n": 8, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as stream:
            pieces = stream.iter_bytes()  # kept: httpx closes a stream with its iterator
            next(pieces)
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(15) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--port", "99999"], "--port is 99999, cannot be listened on at 127.0.0.1"),
        (["--port", "-1"], "--port is -1; give 0 or more"),
        (["--max-queued", "-1"], "--max-queued is -1; give 0 or more"),
        (["--drain-seconds", "0"], "--drain-seconds is 0.0; give seconds, above 0"),
        (["--api-key-file", "/nowhere"], "--api-key-file is '/nowhere', which cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = [] if "--port" in options else ["--port", "0"]
    assert main(["serve", *port, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("foredraft: error: ") and err.count("\n") == 1


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert (
        f"--port is {port}, cannot be listened on at 127.0.0.1 (Address already in use)"
        in capsys.readouterr().err
    )


def test_the_guide_names_every_path(tmp_path: Path) -> None:
    from foredraft.serve.app import create_app
    from foredraft.serve.settings import Settings

    def load() -> None:
        raise AssertionError

    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    paths = json.loads(json.dumps(create_app(load, Settings()).openapi()))["paths"]  # type: ignore[arg-type]
    for path in paths:
        shown = path.replace("{name}", "{id}")
        assert f"`{shown}`" in guide or f" {shown}`" in guide or path == "/version", path
