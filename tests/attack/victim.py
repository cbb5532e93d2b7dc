"""A victim's stream beside an attack: a server in a process of its own, with the demo models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.support.command import environment

STREAM: dict[str, Any] = {
    "model": "demo", "prompt": "def f(n):\n", "max_tokens": 200, "ignore_eos": True, "temperature": 0,
    "stream": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What others saw of an attack.

    Attributes:
        text: Of the victim's last stream.
        gap: The longest time between two pieces of the victim's streams, in seconds.
        health: The longest time of a GET /health, in seconds.
        before: Memory of the server before the attack, in bytes.
        after: The same after it.
    """

    text: str
    gap: float
    health: float
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A server, and a client that is to get its texts whatever another client does.

    Attributes:
        url: Of the server.
        process: Of the server.
    """

    url: str
    process: psutil.Process

    def stream(self) -> tuple[str, float]:
        """Return the text of one stream, and the longest time between two of its pieces."""
        text, gap, last = "", 0.0, None
        with httpx.stream("POST", f"{self.url}/v1/completions", json=STREAM, timeout=120) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    now = time.monotonic()
                    gap, last = max(gap, now - (last or now)), now
        return text, gap

    def beside(self, attack: Callable[[], object]) -> Seen:
        """Run an attack; meanwhile streams follow each other, and /health is asked for."""
        self.stream()  # what the first one costs is no harm of the attack
        before = self.process.memory_info().rss
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
        return Seen(text, gap, slowest[0], before, self.process.memory_info().rss)

    def _probe(self, slowest: list[float], over: threading.Event) -> None:
        with httpx.Client(timeout=120) as client:
            while not over.wait(0.05):
                began = time.monotonic()
                assert client.get(f"{self.url}/health").status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - began)


@contextmanager
def victim(*options: str) -> Iterator[Victim]:
    """Serve the demo models until the block ends.

    Args:
        *options: Of `foredraft serve`.
    """
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", "--policy", "fixed", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    reader: threading.Thread | None = None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("print("):
                break
        address = re.search(r" at (http://127\.0\.0\.1:\d+) ", said)
        assert address, said
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield Victim(address[1], psutil.Process(process.pid))
    finally:
        process.kill()
        process.wait()
        if reader is not None:
            reader.join()
        process.stderr.close()
