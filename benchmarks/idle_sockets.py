"""Open many idle WebSockets: what they cost the server in memory, and a stream beside them in speed.

The sockets belong to a process of its own. Turns with and without them alternate, and each turn times one
stream; texts are compared.

    python benchmarks/idle_sockets.py --sockets 10000 --repeats 6

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
from serving import Client, start_server
from timing import spread
from websockets.asyncio.client import connect
from workload import heldout, machine, write

from foredraft import demo

AT_A_TIME = 100  # handshakes


def raise_file_limit() -> None:
    """Let this process and those that it starts open as many files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def hold(url: str, count: int) -> None:
    """Open sockets, say so, and hold them until the standard input ends."""
    gate, held = asyncio.Semaphore(AT_A_TIME), []

    async def one() -> None:
        async with gate:
            held.append(await connect(url, compression=None, open_timeout=120, ping_interval=None))

    await asyncio.gather(*(one() for _ in range(count)))
    print(len(held), flush=True)
    await asyncio.to_thread(sys.stdin.read)


class Holder:
    """A process that holds idle sockets while the block runs."""

    def __init__(self, url: str, count: int) -> None:
        self._command = [sys.executable, __file__, "--hold", url, "--sockets", str(count)]
        self._count = count

    def __enter__(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        opened = self._process.stdout.readline().strip()
        if opened != str(self._count):
            raise RuntimeError(f"the sockets could not be opened: {opened!r}")

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


async def measure(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    client, process = Client(url), psutil.Process(pid)
    await client.connect()
    [prompt] = heldout(1)

    async def stream() -> tuple[str, float]:
        begun = time.perf_counter()
        text, _ = await client.text(prompt, given.new_tokens)
        return text, time.perf_counter() - begun

    def memory() -> int:
        return process.memory_info().rss

    want, _ = await stream()
    same, ratios, grown = True, [], []
    for _ in range(given.repeats):
        before, (text, without) = memory(), await stream()
        with Holder(url.replace("http", "ws") + "/v1/stream", given.sockets):
            grown.append(memory() - before)
            await asyncio.sleep(given.rest)  # the handshakes are over, and pings go out
            other, beside = await stream()
        same &= text == other == want
        ratios.append(beside / without)
        await asyncio.sleep(given.rest)
    await client.http.aclose()
    return {
        "mebibytes": max(grown) / (1 << 20), "bytes_per_socket": max(grown) / given.sockets,
        "seconds_beside_over_without": spread(ratios), "median": statistics.median(ratios), "identical": same,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--rest", type=float, default=5, help="seconds after sockets opened or closed")
    parser.add_argument("--name", default="idle_sockets")
    parser.add_argument("--hold", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    raise_file_limit()
    if given.hold is not None:
        asyncio.run(hold(given.hold, given.sockets))
        return
    process, url = start_server(str(demo.target_path()), str(demo.draft_path()))
    try:
        found = asyncio.run(measure(url, process.pid, given))
    finally:
        process.terminate()
        process.communicate()
    write(given.name, {"what": vars(given), "machine": machine(), "cases": found})


if __name__ == "__main__":
    main()
