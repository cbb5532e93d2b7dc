"""A victim's stream beside an attack, on a server in a process of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.support.command import started_server

STREAM: dict[str, Any] = {
    "model": "demo", "prompt": "def f(n):\n", "max_tokens": 200, "ignore_eos": True, "temperature": 0,
    "stream": True,
}  # fmt: skip


SETTLING_SECONDS = 4.0  # that a server has to give memory back


@dataclass(frozen=True, slots=True)
class Seen:
    """What others saw of an attack.

    Attributes:
        text: Of the victim's last stream.
        gap: The longest time between two pieces of the victim's streams, in seconds.
        health: The longest time of a GET /health, in seconds.
        before: Memory of the server before the attack, in bytes.
        after: The same after it, the least of the next seconds.
        threads: That the server had more at the end of the attack.
    """

    text: str
    gap: float
    health: float
    before: int
    after: int
    threads: int


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
        # what the first requests cost, also side by side, is no harm of the attack
        side_by_side = {**STREAM, "stream": False, "n": 4}
        assert httpx.post(f"{self.url}/v1/completions", json=side_by_side, timeout=120).status_code == 200
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
    """Serve a model until the block ends.

    Args:
        *options: Of `foredraft serve`.
    """
    with started_server(*options) as (process, url, _):
        yield Victim(url, psutil.Process(process.pid))
