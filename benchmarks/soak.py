"""Soak a server: clients that connect, cancel at every phase, read slowly, and send garbage and huge bodies.

Well-behaved requests run beside them, and each must get its exact text. At the end nothing may be left: no
sample runs or waits, no thread and no connection is more than before, and the memory is flat.

    python -m benchmarks.soak --clients 200 --minutes 30
    python -m benchmarks.soak --url http://127.0.0.1:8000 --pid 1234

The last line is one JSON object; the exit code is 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from websockets.asyncio.client import connect

from benchmarks.serving import start_server
from foredraft import demo

PATH = "/v1/completions"
HUGE = 64 << 20  # bytes that a client announces or sends, more than any server takes
PATIENCE = 300.0  # seconds for one request


class Soak:
    """Clients of one server: `done` counts turns by kind, `wrong` says what went wrong."""

    def __init__(self, url: str, new_tokens: int, seed: int = 0) -> None:
        self.url, self.dice = url, random.Random(seed)
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self.new_tokens = new_tokens
        self.long = {"max_tokens": 16 * new_tokens, "n": 2}  # requests that their clients leave
        self.prompts = [f"def f{place}(x):\n" for place in range(8)]
        self.texts: dict[str, str] = {}
        self.name = ""
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kinds: list[Callable[[], Awaitable[None]]] = [
            self.whole, self.stream, self.slow_stream, self.socket, self.connect_only, self.half_head,
            self.half_body, self.leave_waiting, self.leave_streaming, self.garbage, self.wrong_body,
            self.announce_huge, self.send_huge, self.socket_garbage, self.socket_cancel, self.socket_leave,
        ]  # fmt: skip

    async def prepare(self) -> None:
        """Ask for the text of each prompt while nothing else runs."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            self.name = (await http.get("/v1/models")).json()["data"][0]["id"]
            for prompt in self.prompts:
                found = await http.post(PATH, json=self.body(prompt))
                self.texts[prompt] = found.json()["choices"][0]["text"]

    async def run(self, clients: int, until: Callable[[int], bool]) -> None:
        """Let clients take turns until `until`, which gets the turns so far, says so."""

        async def client() -> None:
            while not until(sum(self.done.values())):
                kind = self.dice.choice(self.kinds)
                self.done[kind.__name__] += 1
                try:
                    await asyncio.wait_for(kind(), PATIENCE)
                except Exception as error:
                    self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

        await asyncio.gather(*(client() for _ in range(clients)))

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        fields = {"max_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self.name, "prompt": prompt, **fields, **more}

    def check(self, prompt: str, text: str) -> None:
        if text != self.texts[prompt]:
            raise AssertionError(f"the text after {prompt!r} is {text!r}")

    # --- clients that behave: status 503 is an answer, too ------------------------------------------------

    async def whole(self) -> None:
        prompt = self.dice.choice(self.prompts)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http:
            found = await http.post(PATH, json=self.body(prompt))
        if found.status_code != 503:
            self.check(prompt, found.json()["choices"][0]["text"])

    async def stream(self, pause: float = 0.0) -> None:
        prompt, text = self.dice.choice(self.prompts), ""
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=PATIENCE) as http,
            http.stream("POST", PATH, json=self.body(prompt, stream=True)) as response,
        ):
            if response.status_code == 503:
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    await asyncio.sleep(pause)
        self.check(prompt, text)

    async def slow_stream(self) -> None:
        await self.stream(pause=0.05)

    async def socket(self) -> None:
        prompt, text = self.dice.choice(self.prompts), ""
        async with self._socket() as ws:
            await ws.send(json.dumps(self.body(prompt, id="a")))
            while "done" not in (frame := json.loads(await ws.recv())):
                if "error" in frame:
                    return
                text += frame["chunk"]["choices"][0]["text"]
        self.check(prompt, text)

    # --- clients that do not ------------------------------------------------------------------------------

    async def connect_only(self) -> None:
        await self._send(b"")

    async def half_head(self) -> None:
        data = self._request()
        await self._send(data[: self.dice.randrange(1, data.index(b"\r\n\r\n"))])

    async def half_body(self) -> None:
        data = self._request()
        await self._send(data[: self.dice.randrange(data.index(b"\r\n\r\n") + 4, len(data))])

    async def leave_waiting(self) -> None:
        await self._send(self._request(**self.long), wait=self.dice.choice((0.0, 0.01, 0.1)))

    async def leave_streaming(self) -> None:
        await self._send(self._request(stream=True, **self.long), read=self.dice.choice((1, 400, 4000)))

    async def garbage(self) -> None:
        # A single letter may begin a request, and the server waits for the rest of it.
        await self._send(self.dice.randbytes(self.dice.choice((1, 100, 100_000))), read=1, patience=1.0)

    async def wrong_body(self) -> None:
        body = self.dice.choice((b"{", b"[1]", b"\xff", b'{"model": 3}', b"[" * 10_000, b"{}" * 1000))
        await self._send(self._head(len(body)) + body, read=1)

    async def announce_huge(self) -> None:
        await self._send(self._head(HUGE) + b"x", read=1)

    async def send_huge(self) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        part = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
        await self._send(head, *[part] * (HUGE >> 16), read=1)

    async def socket_garbage(self) -> None:
        async with self._socket() as ws:
            for frame in ("{", "[]", b"\x00\xff", '{"id": 3}', "x" * 100_000):
                await ws.send(frame)
                if "error" not in json.loads(await ws.recv()):
                    raise AssertionError("garbage was not answered with an error")

    async def socket_cancel(self) -> None:
        async with self._socket() as ws:
            await ws.send(json.dumps(self.body(self.prompts[0], id="a", **self.long)))
            await asyncio.sleep(self.dice.choice((0.0, 0.01, 0.1)))
            await ws.send('{"id": "a", "cancel": true}')
            while "done" not in json.loads(await ws.recv()):
                pass

    async def socket_leave(self) -> None:
        async with self._socket() as ws:
            for id in ("a", "b"):
                await ws.send(json.dumps(self.body(self.prompts[0], id=id, **self.long)))
            await asyncio.sleep(self.dice.choice((0.0, 0.05)))
            ws.transport.abort()

    # --- tools --------------------------------------------------------------------------------------------

    def _socket(self) -> Any:
        return connect(self.url.replace("http", "ws") + "/v1/stream", compression=None, open_timeout=PATIENCE)

    def _head(self, length: int) -> bytes:
        return f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {length}\r\n\r\n".encode()

    def _request(self, **more: Any) -> bytes:
        body = json.dumps(self.body(self.dice.choice(self.prompts), **more)).encode()
        return self._head(len(body)) + body

    async def _send(
        self, *parts: bytes, wait: float = 0.0, read: int = 0, patience: float | None = None
    ) -> None:
        """Send bytes, wait, read at least so many unless the server ends it, and reset the connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            with suppress(ConnectionError, TimeoutError):  # the server may have had enough
                async with asyncio.timeout(patience):
                    for part in parts:
                        writer.write(part)
                        await writer.drain()
                    await asyncio.sleep(wait)
                    while read > 0 and (data := await reader.read(read)):
                        read -= len(data)
        finally:
            writer.transport.abort()


async def settled(url: str, seconds: float = 60) -> bool:
    """Return whether the server becomes idle within a time."""
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http:
        while time.monotonic() < end:
            lines = (await http.get("/metrics")).text.splitlines()
            names = ("foredraft_requests_running ", "foredraft_requests_waiting ", "foredraft_cache_usage ")
            if all(float(line.split()[1]) == 0 for line in lines if line.startswith(names)):
                return True
            await asyncio.sleep(0.1)
    return False


def state_of(process: psutil.Process) -> dict[str, int]:
    return {
        "threads": process.num_threads(), "files": process.num_fds(),
        "mebibytes": process.memory_info().rss >> 20,
    }  # fmt: skip


async def soak(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """Soak a server; the first third of the time warms it up, for the memory's sake."""
    run, process = Soak(url, given.new_tokens, given.seed), psutil.Process(pid)
    await run.prepare()
    states = []
    for share in (1, 2):
        end = time.monotonic() + share / 3 * 60 * given.minutes
        await run.run(given.clients, lambda _, end=end: time.monotonic() > end)
        if not await settled(url):
            run.wrong.append("the server is not idle at the end")
        await asyncio.sleep(12)  # idle threads of the pool end after 10 seconds
        states.append(state_of(process))
    warm, last = states
    if last["threads"] > warm["threads"] + 2 or last["files"] > warm["files"] + 8:
        run.wrong.append("threads or files are left over")
    if last["mebibytes"] > 1.1 * warm["mebibytes"] + 32:
        run.wrong.append("the memory grew")
    return {"turns": dict(run.done), "wrong": run.wrong[:20], "warm": warm, "last": last}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a server that runs; default: one of its own")
    parser.add_argument("--pid", type=int, help="of that server")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.url is not None:
        if given.pid is None:
            parser.error("--url needs --pid")
        found = asyncio.run(soak(given.url, given.pid, given))
    else:
        process, port = start_server("--draft", str(demo.draft_path()))
        try:
            found = asyncio.run(soak(f"http://127.0.0.1:{port}", process.pid, given))
        finally:
            process.terminate()
            process.wait()
    print(json.dumps(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
