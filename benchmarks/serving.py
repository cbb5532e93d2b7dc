"""Time the server beside the engine that it serves, in turns, on the demo target with padding layers.

    single      one stream over HTTP, against the same request in this process
    batch       16 streams at a time over HTTP, against one call for 16 prompts
    first       the first token of a prompt that arrives while 15 streams decode, against an idle server

The server runs in a process of its own; the one of both that waits sleeps. Seconds are
those of the same requests, and texts are compared.

    python benchmarks/serving.py --layers 48
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from timing import spread
from workload import DEMO_LAYERS, heldout, machine, padded_demo, write

import foredraft
from foredraft import demo

ROWS = 16


def start_server(model: str, draft: str) -> tuple[subprocess.Popen[str], str]:
    command = [
        sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", "--model", model, "--draft", draft,
        "--policy", "fixed", "--drafter", "draft-model", "--max-batch", str(ROWS), "--max-length", "1024",
        "--no-access-log",  # nothing reads the pipe
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serves \S+ at (\S+) ", line):
            return process, found[1]
    raise RuntimeError("the server did not start")


class Client:
    """Requests to the server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=600)
        self.name = ""

    async def connect(self) -> None:
        self.name = (await self.http.get("/v1/models")).json()["data"][0]["id"]

    async def text(self, prompt: str, new_tokens: int) -> tuple[str, float]:
        """Stream a text; return it, and the seconds to its first chunk."""
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        text, first, begun = "", 0.0, time.perf_counter()
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    first = first or time.perf_counter() - begun
        return text, first


async def measure(llm: foredraft.LLM, url: str, repeats: int, new_tokens: int) -> dict[str, Any]:
    client = Client(url)
    await client.connect()
    prompts = (heldout(8) * 2)[:ROWS]
    params = llm.params(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)

    def engine(some: list[str]) -> tuple[list[str | None], float]:
        begun = time.perf_counter()
        outputs = llm.generate(some, params)
        return [output.text for output in outputs], time.perf_counter() - begun

    async def server(some: list[str]) -> tuple[list[str | None], float]:
        begun = time.perf_counter()
        found = await asyncio.gather(*(client.text(prompt, new_tokens) for prompt in some))
        return [text for text, _ in found], time.perf_counter() - begun

    cases: dict[str, Any] = {}
    for name, batches in (("single", [[prompt] for prompt in prompts[:4]]), ("batch", [prompts])):
        ratios, same = [], True
        for turn in range(-1, repeats):
            for some in batches:
                mine, own = engine(some)
                theirs, other = await server(some)
                same &= mine == theirs
                if turn >= 0:
                    ratios.append(own / other)
        cases[name] = {"server_over_engine": spread(ratios), "identical": same}
    idle, busy = [], []
    short = " ".join(prompts[0].split()[:8])
    for _ in range(repeats):
        idle.append((await client.text(short, 2))[1])
        others = [asyncio.create_task(client.text(prompt, 4 * new_tokens)) for prompt in prompts[: ROWS - 1]]
        await asyncio.sleep(2)
        busy.append((await client.text(short, 2))[1])
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.5)
    ratio = statistics.median(busy) / statistics.median(idle)
    cases["first"] = {"idle_seconds": spread(idle), "busy_seconds": spread(busy), "busy_over_idle": ratio}
    await client.http.aclose()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--name", default="serving")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = str(demo.target_path())
        if given.layers > DEMO_LAYERS:
            model = str(padded_demo(Path(folder) / "target", given.layers))
        draft = str(demo.draft_path())
        llm = foredraft.load(
            model, draft=draft, policy="fixed", drafter="draft-model", max_batch=ROWS, max_length=1024
        )
        process, url = start_server(model, draft)
        try:
            cases = asyncio.run(measure(llm, url, given.repeats, given.new_tokens))
        finally:
            process.terminate()
            process.communicate()
    write(given.name, {"what": vars(given), "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
