"""Open many idle WebSockets: what they cost the server in memory, and a stream beside them in speed.

The sockets belong to a process of its own. Turns with and without them alternate, and each turn times one
stream; texts are compared.

    python -m benchmarks.idle_sockets --sockets 10000 --repeats 6

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from websockets.asyncio.client import connect

from benchmarks.contending import TREE
from benchmarks.serving import Client, start_server
from benchmarks.timing import Quiet, spread
from benchmarks.workload import heldout, machine, padded_demo, write
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
        self._command = [
            sys.executable,
            "-m",
            "benchmarks.idle_sockets",
            "--hold",
            url,
            "--sockets",
            str(count),
        ]
        self._count = count

    def __enter__(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TREE
        )
        assert self._process.stdout is not None
        opened = self._process.stdout.readline().strip()
        if opened != str(self._count):
            raise RuntimeError(f"the sockets could not be opened: {opened!r}")

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def measure(port: int, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    client, process = Client(), psutil.Process(pid)
    [prompt] = heldout(1)
    body = {
        "model": "target", "prompt": prompt, "max_tokens": given.new_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip

    def stream() -> tuple[str, float]:
        [found] = client.read(port, [body])
        return found["text"], found["seconds"]

    def memory() -> int:
        return process.memory_info().rss

    want, _ = stream()
    same, grown = True, list[int]()

    def turn() -> float:
        nonlocal same
        before, (text, without) = memory(), stream()
        with Holder(f"ws://127.0.0.1:{port}/v1/stream", given.sockets):
            grown.append(memory() - before)
            time.sleep(given.rest)  # the handshakes are over, and pings go out
            other, beside = stream()
        same &= text == other == want
        time.sleep(given.rest)
        return beside / without

    quiet = Quiet(given.repeats)
    ratios = [quiet.take(turn) for _ in range(given.repeats)]
    client.close()
    return {
        "mebibytes": max(grown) / (1 << 20), "bytes_per_socket": max(grown) / given.sockets,
        "seconds_beside_over_without": spread(ratios), "identical": same,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
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
    with TemporaryDirectory() as folder:
        model = padded_demo(Path(folder) / "target", given.layers)
        process, port = start_server(
            "--model", str(model), "--draft", str(demo.draft_path()),
            "--max-connections", str(given.sockets + 100), "--max-connections-per-address", "0",
        )  # fmt: skip
        try:
            found = measure(port, process.pid, given)
        finally:
            process.terminate()
            process.wait()
    write(given.name, {"what": vars(given), "machine": machine(), "cases": found})


if __name__ == "__main__":
    main()
