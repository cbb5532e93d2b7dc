"""Time `foredraft serve` beside other servers of the same weights, in turns, at 1, 4 and 16 streams.

    foredraft     the demo target with padding layers, its draft model, policy auto
    plain         the same server, with drafter "none"
    llama.cpp     the server of llama-cpp-python, from a GGUF file of the same weights (bfloat16)
    vllm          vLLM's, where a Python that has it is given

Each server has all cores, and those that wait sleep. Requests are greedy and of one length; the end of a text
is ignored or banned. llama.cpp cuts words by rules of its own, and both round otherwise, so texts may differ;
the figure is tokens by second.

    python -m benchmarks.serving_peers --llama PYTHON [--vllm PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.serving import Client, start_server
from benchmarks.timing import Quiet, spread
from benchmarks.workload import heldout, machine, padded_demo, write
from foredraft import demo
from foredraft.bench.gguf_file import write_gguf

POSITIONS, ROWS = 1024, 16
AT_A_TIME = (1, 4, 16)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def start_peer(command: list[str], port: int, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start another server, and wait until it lists its model."""
    process = subprocess.Popen(
        command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env={**os.environ, **environment}
    )
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).read()
            return process
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.5)
    raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")


def ask_every_way(
    client: Client,
    ways: dict[str, tuple[int, dict[str, Any]]],
    fields: dict[str, Any],
    prompts: list[str],
    texts: dict[str, list[str]],
) -> dict[str, float]:
    """Return the seconds until all prompts are answered, by way; keep the answers in `texts`."""
    seconds = {}
    for name, (port, own) in ways.items():
        found = client.read(port, [{**fields, **own, "prompt": prompt} for prompt in prompts])
        texts[name] = [each["text"] for each in found]
        seconds[name] = float(max(each["seconds"] for each in found))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama", help="a Python with llama-cpp-python[server]")
    parser.add_argument("--vllm", help="a Python with vLLM's CPU build")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--name", default="serving_peers")
    given = parser.parse_args()
    threads = str(torch.get_num_threads())
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = padded_demo(folder / "target", given.layers)
        own, port = start_server(
            "--model", str(model), "--draft", str(demo.draft_path()), "--max-batch", str(ROWS),
            "--max-length", str(POSITIONS),
        )  # fmt: skip
        processes: list[subprocess.Popen[Any]] = [own]
        greedy: dict[str, Any] = {"model": "target", "temperature": 0, "stream": True}
        ways: dict[str, tuple[int, dict[str, Any]]] = {
            "foredraft": (port, {"ignore_eos": True}),
            "plain": (port, {"ignore_eos": True, "drafter": "none"}),
        }
        try:
            if given.llama:
                file, at = folder / "model.gguf", free_port()
                write_gguf(model, file, torch.bfloat16, vocabulary=True)
                command = [
                    given.llama, "-m", "llama_cpp.server", "--model", str(file), "--host", "127.0.0.1",
                    "--port", str(at), "--n_ctx", str(POSITIONS), "--n_threads", threads, "--n_threads_batch",
                    threads, "--verbose", "False",
                ]  # fmt: skip
                processes.append(start_peer(command, at, folder / "llama.log"))
                ways["llama.cpp"] = at, {"logit_bias": {"0": -100}}
            if given.vllm:
                at = free_port()
                command = [
                    given.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                    "--served-model-name", "target", "--dtype", "bfloat16", "--host", "127.0.0.1", "--port",
                    str(at), "--max-model-len", str(POSITIONS), "--max-num-seqs", str(ROWS),
                ]  # fmt: skip
                limits = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
                processes.append(
                    start_peer(
                        command,
                        at,
                        folder / "vllm.log",
                        OMP_NUM_THREADS=threads,
                        HF_HUB_OFFLINE="1",
                        **limits,
                    )
                )
                ways["vllm"] = at, {"ignore_eos": True}
            client = Client()
            cases = {}
            for at_a_time in AT_A_TIME:
                prompts = (heldout(8) * 2)[:at_a_time]
                seconds: dict[str, list[float]] = {name: [] for name in ways}
                texts: dict[str, list[str]] = {}
                turn = partial(
                    ask_every_way, client, ways, greedy | {"max_tokens": given.new_tokens}, prompts, texts
                )
                turn()
                quiet = Quiet(given.repeats)
                for _ in range(given.repeats):
                    for name, taken in quiet.take(turn).items():
                        seconds[name].append(taken)
                cases[str(at_a_time)] = {
                    name: {
                        "tokens_per_second": at_a_time * given.new_tokens / statistics.median(each),
                        "foredraft_over_it": spread(
                            [theirs / ours for theirs, ours in zip(each, seconds["foredraft"], strict=True)]
                        ),
                        "same_texts": sum(map(str.__eq__, texts[name], texts["foredraft"])),
                    }
                    for name, each in seconds.items()
                }
                print(at_a_time, json.dumps(cases[str(at_a_time)]), file=sys.stderr, flush=True)
            client.close()
        finally:
            for process in processes:
                process.terminate()
                process.wait()
    what = {**vars(given), "llama": bool(given.llama), "vllm": bool(given.vllm)}
    write(given.name, {"what": what, "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
