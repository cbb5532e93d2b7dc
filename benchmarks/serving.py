"""Time the server beside the engine that it serves, in turns, on the demo target with padding layers.

    single    one stream over HTTP; beside it the engine in this process, which writes the same chunks itself
    batch     16 streams at a time over HTTP; beside it one call of the engine for 16 prompts
    first     the first token of a 64-token prompt while 15 streams decode, and on an idle server
    prefix    the first token of a prompt of which the prefix cache has 1,024 tokens, and of one that is new
    auto      policy auto, always drafting and never drafting, at 1, 4, 16 and 32 streams at a time

One client process reads all streams, the engine's own too, by the same code; the one of both engines that
waits sleeps. Ratios are of turns that follow each other, and texts are compared.

    python -m benchmarks.serving --layers 48
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import foredraft
from benchmarks.timing import Quiet, spread
from benchmarks.workload import heldout, machine, padded_demo, write
from foredraft import LLM, demo

ROWS, POSITIONS = 32, 1536
# What a request says of its drafts.
WAYS: dict[str, dict[str, str]] = {
    "auto": {},
    "never": {"drafter": "none"},
    "always": {"policy": "fixed", "drafter": "draft-model"},
}
CASES = ("single", "batch", "first", "prefix", "auto")
CLIENT = Path(__file__).with_name("stream_client.py")


class Client:
    """The process that reads streams."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CLIENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, port: int, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send requests at a time; return each one's text, seconds to the first chunk, and seconds in all."""
        self.send(port, bodies)
        return self.result()

    def send(self, port: int, bodies: list[dict[str, Any]], leave: float | None = None) -> None:
        """Send requests at a time, and leave them after some seconds where a time is given."""
        assert self._process.stdin is not None
        print(
            json.dumps({"port": port, "bodies": bodies, "leave": leave}), file=self._process.stdin, flush=True
        )

    def result(self) -> list[dict[str, Any]]:
        assert self._process.stdout is not None
        found: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class OwnSender:
    """Streams of the engine in this process: the thread that decodes writes each piece to the client."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._listening = llm, socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def serve_one(self) -> None:
        connection, _ = self._listening.accept()
        with connection, connection.makefile("rb") as reader:
            length = 0
            while (line := reader.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            body = json.loads(reader.read(length))
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            params = self._llm.params(
                temperature=0, max_new_tokens=body["max_tokens"], ignore_eos=True, policy=body.get("policy"),
                drafter=body.get("drafter"),
            )  # fmt: skip
            for piece in self._llm.stream(body["prompt"], params):
                chunk = {"choices": [{"index": 0, "text": piece.text}]}
                connection.sendall(f"data: {json.dumps(chunk)}\n\n".encode())
            connection.sendall(b"data: [DONE]\n\n")


def start_server(*options: str, tree: Path | None = None) -> tuple[subprocess.Popen[str], int]:
    """Start `foredraft serve` with options, perhaps of another working tree; return its process and port."""
    command = [sys.executable, "-m", "foredraft.cli", "serve", "--port", "0", "--no-access-log", *options]
    environment = os.environ if tree is None else os.environ | {"PYTHONPATH": str(tree / "src")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serves \S+ at http://[^ ]*:(\d+) ", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, int(found[1])
    raise RuntimeError("the server did not start")


class Measurement:
    """All cases, with one server and one engine of the same models."""

    def __init__(self, llm: LLM, port: int, client: Client, name: str, given: argparse.Namespace) -> None:
        self.llm, self.port, self.client, self.name, self.given = llm, port, client, name, given

    def body(self, prompt: str | list[int], new_tokens: int, **own: Any) -> dict[str, Any]:
        return {
            "model": self.name, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, **own,
        }  # fmt: skip

    def single(self) -> dict[str, Any]:
        sender, ratios, same = OwnSender(self.llm), [], True

        def turn(prompt: str) -> float:
            nonlocal same
            bodies = [self.body(prompt, self.given.new_tokens, **WAYS["always"])]
            thread = threading.Thread(target=sender.serve_one)
            thread.start()
            [own] = self.client.read(sender.port, bodies)
            thread.join()
            [other] = self.client.read(self.port, bodies)
            same &= own["text"] == other["text"]
            return float(own["seconds"] / other["seconds"])

        prompts = heldout(4)
        for prompt in prompts:
            turn(prompt)
        quiet = Quiet(self.given.repeats * len(prompts))
        for _ in range(self.given.repeats):
            ratios += [quiet.take(partial(turn, prompt)) for prompt in prompts]
        return {"server_over_engine": spread(ratios), "identical": same}

    def batch(self) -> dict[str, Any]:
        same, prompts = True, (heldout(8) * 2)
        params = self.llm.params(
            temperature=0, max_new_tokens=self.given.new_tokens, ignore_eos=True, **WAYS["always"]
        )
        bodies = [self.body(prompt, self.given.new_tokens, **WAYS["always"]) for prompt in prompts]

        def turn() -> float:
            nonlocal same
            begun = time.perf_counter()
            outputs = self.llm.generate(prompts, params)
            own = time.perf_counter() - begun
            found = self.client.read(self.port, bodies)
            same &= [output.text for output in outputs] == [each["text"] for each in found]
            return float(own / max(each["seconds"] for each in found))

        turn()
        quiet = Quiet(self.given.repeats)
        ratios = [quiet.take(turn) for _ in range(self.given.repeats)]
        return {"server_over_engine": spread(ratios), "identical": same}

    def first(self) -> dict[str, Any]:
        cases: dict[str, Any] = {}
        ids = [id for prompt in heldout(8) for id in self.llm.encode(prompt)[0]]
        others = Client()
        try:
            for name, own in (("auto", WAYS["auto"]), ("fixed", WAYS["always"]), ("plain", WAYS["never"])):
                idle, busy = [], []
                for turn in range(self.given.repeats):
                    short = [self.body(ids[turn : turn + 64], 2, **own)]  # no two begin alike
                    idle.append(self.client.read(self.port, short)[0]["first"])
                    others.send(
                        self.port,
                        [self.body(prompt, 900, **own) for prompt in (heldout(8) * 2)[:15]],
                        leave=6.0,
                    )
                    time.sleep(2)
                    for more in range(3):
                        at = 64 * (1 + more) + turn
                        busy.append(
                            self.client.read(self.port, [self.body(ids[at : at + 64], 2, **own)])[0]["first"]
                        )
                    others.result()
                    time.sleep(0.5)
                ratio = statistics.median(busy) / statistics.median(idle)
                cases[name] = {
                    "idle_seconds": spread(idle),
                    "busy_seconds": spread(busy),
                    "busy_over_idle": ratio,
                }
        finally:
            others.close()
        return cases

    def prefix(self) -> dict[str, Any]:
        ids = [id for prompt in heldout(60) for id in self.llm.encode(prompt)[0]]
        cold, warm, cached = [], [], []
        for turn in range(self.given.repeats):
            long = ids[turn : turn + 1 + 1024]
            for tail, seconds in ((ids[:32], cold), (ids[32:64], warm)):
                [found] = self.client.read(
                    self.port, [self.body([*long, *tail], 2, stream_options={"include_usage": True})]
                )
                seconds.append(found["first"])
                cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
        return {
            "cold_seconds": spread(cold),
            "warm_seconds": spread(warm),
            "cached_tokens": cached,
            "cold_over_warm": statistics.median(cold) / statistics.median(warm),
        }

    def every_way(self, prompts: list[str], texts: set[tuple[str, ...]]) -> dict[str, float]:
        """Return the seconds until all prompts are answered, by way; add the answers to `texts`."""
        seconds = {}
        for name, own in WAYS.items():
            bodies = [self.body(prompt, self.given.new_tokens, **own) for prompt in prompts]
            found = self.client.read(self.port, bodies)
            texts.add(tuple(each["text"] for each in found))
            seconds[name] = float(max(each["seconds"] for each in found))
        return seconds

    def auto(self) -> dict[str, Any]:
        cases = {}
        for at_a_time in (1, 4, 16, 32):
            prompts = (heldout(8) * 4)[:at_a_time]
            seconds: dict[str, list[float]] = {name: [] for name in WAYS}
            texts = set[tuple[str, ...]]()
            turn = partial(self.every_way, prompts, texts)
            turn()
            quiet = Quiet(self.given.repeats)
            for _ in range(self.given.repeats):
                for name, taken in quiet.take(turn).items():
                    seconds[name].append(taken)
            best = min(("never", "always"), key=lambda name: statistics.median(seconds[name]))
            ratios = [theirs / own for theirs, own in zip(seconds[best], seconds["auto"], strict=True)]
            tokens = at_a_time * self.given.new_tokens
            cases[str(at_a_time)] = {
                "auto_over_best": spread(ratios), "best": best, "identical": len(texts) == 1,
                "tokens_per_second": {
                    name: tokens / statistics.median(each) for name, each in seconds.items()
                },
            }  # fmt: skip
        return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--name", default="serving")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = str(padded_demo(Path(folder) / "target", given.layers, POSITIONS))
        draft = str(demo.draft_path())
        llm = foredraft.load(model, draft=draft, max_batch=ROWS, max_length=POSITIONS)
        process, port = start_server(
            "--model", model, "--draft", draft, "--max-batch", str(ROWS), "--max-length", str(POSITIONS)
        )
        client = Client()
        try:
            measurement = Measurement(llm, port, client, Path(model).name, given)
            cases = {}
            for name in given.cases:
                case: Callable[[], dict[str, Any]] = getattr(measurement, name)
                cases[name] = case()
                print(name, json.dumps(cases[name]), file=sys.stderr, flush=True)
        finally:
            client.close()
            process.terminate()
            process.wait()
    write(given.name, {"what": vars(given), "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
