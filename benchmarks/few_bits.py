"""Weights of few bits at a real model's shape: steps and short passes, beside llama.cpp and OpenVINO.

The checkpoint has 1.24 billion random weights (`shape.py`). The bfloat16 model and its copies in few bits
take turns with llama.cpp on the same weights as Q4_0 and Q8_0, and with OpenVINO, which quantises them to 4
bits in groups of 32 and to 8 bits, after a warm-up. A ratio is the median of the ratios within the turns,
with quartiles.

    python -m benchmarks.few_bits --repeats 15 --openvino PYTHON
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.loading import loading_memory
from benchmarks.shape import SHAPES, random_checkpoint
from benchmarks.timing import OwnSeconds, interleaved, spread
from benchmarks.workload import machine, write
from foredraft import LLM
from foredraft.bench import llama_cpp
from foredraft.bench.contender import BenchContext
from foredraft.bench.gguf_file import write_gguf
from foredraft.drafters.low_bit import low_bit_copy
from foredraft.model.quantisation import BITS

ROWS = (1, 4, 8, 16)
CONTEXT, POSITIONS = 128, 512  # tokens in the KV cache before a pass, and its room
PEERS = {"int4": "LLAMA_FTYPE_MOSTLY_Q4_0", "int8": "LLAMA_FTYPE_MOSTLY_Q8_0"}


def load(folder: Path, weights: str | None) -> LLM:
    return foredraft.load(
        folder, device="cpu", weights=weights, max_batch=1, max_length=POSITIONS, drafter="none"
    )


def peer(llm: LLM, folder: Path, kind: str) -> llama_cpp.LlamaCpp:
    """Return llama.cpp on the checkpoint, quantised by its own program code."""

    def write_quantised(target: Path, file: Path, dtype: torch.dtype) -> None:
        whole = file.with_suffix(".whole")
        write_gguf(target, whole, dtype)
        library: Any = llama_cpp.module("llama_cpp", "llama.cpp")
        params = library.llama_model_quantize_default_params()
        params.ftype, params.nthread = getattr(library, kind), torch.get_num_threads()
        failed = library.llama_model_quantize(str(whole).encode(), str(file).encode(), ctypes.byref(params))
        whole.unlink()
        if failed:
            raise SystemExit(f"llama.cpp cannot quantise to {kind}")

    before, llama_cpp.write_gguf = llama_cpp.write_gguf, write_quantised
    try:
        context = BenchContext(llm, folder, None, torch.bfloat16, torch.device("cpu"), POSITIONS)
        return llama_cpp.LlamaCpp(context)
    finally:
        llama_cpp.write_gguf = before


class OpenVINO:
    """OpenVINO in a process of its own (`openvino_worker.py`); `python` has optimum-intel."""

    def __init__(self, python: str, folder: Path, bits: int) -> None:
        worker = Path(__file__).with_name("openvino_worker.py")
        self._process = subprocess.Popen(
            [python, *map(str, (worker, folder, bits, CONTEXT))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise SystemExit("OpenVINO did not start")

    def forward_seconds(self, rows: int, context: int) -> float:
        """Return the seconds of a pass over so many tokens after a context of `CONTEXT` tokens."""
        assert context == CONTEXT and self._process.stdin is not None and self._process.stdout is not None
        print(rows, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def start_peers(llm: LLM, folder: Path, openvino: str | None) -> dict[str, Any]:
    """Return the peers by name: "PEER WEIGHTS"."""
    found: dict[str, Any] = {f"llama.cpp {name}": peer(llm, folder, kind) for name, kind in PEERS.items()}
    if openvino is not None:
        found |= {f"OpenVINO {name}": OpenVINO(openvino, folder, bits) for name, bits in BITS.items()}
    return found


def passes(folder: Path, repeats: int, peers: Callable[[LLM], dict[str, Any]]) -> dict[str, Any]:
    """Time passes by rows: the bfloat16 model, its copies in few bits, and the peers."""
    llm = load(folder, None)
    target = llm.loaded.runner
    runners = {"bfloat16": target} | {name: low_bit_copy(target, bits) for name, bits in BITS.items()}
    cache = target.new_cache(1, POSITIONS)
    works: dict[Any, Callable[[], object]] = {}
    for name, runner in runners.items():
        runner.reserve_positions(cache.stored)
        for rows in ROWS:
            tokens = torch.zeros(1, rows, dtype=torch.int64)
            works[name, rows] = lambda runner=runner, tokens=tokens: runner.forward(cache, tokens, [CONTEXT])  # type: ignore[misc]
    others = peers(llm)
    for name, other in others.items():
        for rows in ROWS:  # timed by the contender, which has to fill its KV cache before each pass
            works[name, rows] = lambda rows=rows, other=other: OwnSeconds(  # type: ignore[misc]
                other.forward_seconds(rows, CONTEXT)
            )
    seconds = interleaved(works, torch.device("cpu"), repeats)
    for other in others.values():
        other.close()

    def ratio(one: Any, other: Any) -> dict[str, Any]:
        return spread([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])

    names = [*runners, *others]
    return {
        "milliseconds": {
            name: {rows: spread([1e3 * s for s in seconds[name, rows]]) for rows in ROWS} for name in names
        },
        "v": {name: {rows: ratio((name, rows), (name, 1)) for rows in ROWS} for name in names},
        "c": {name: ratio((name, 1), ("bfloat16", 1)) for name in BITS},
        "peer_over_foredraft": {
            name: {rows: ratio((name, rows), (name.split()[-1], rows)) for rows in ROWS} for name in others
        },
    }


def loading(folder: Path, weights: str | None) -> dict[str, Any]:
    """Return the seconds and the memory of loading, in a process of its own."""
    foredraft.load(device="cpu", drafter="none", max_batch=1, max_length=64)  # what loading touches once
    started = time.perf_counter()
    found = loading_memory(lambda: load(folder, weights))
    return found | {"seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time weights of few bits.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--openvino", help="a Python with optimum-intel[openvino]")
    parser.add_argument("--loading", choices=("none", *BITS), help="only load, in this process")
    parser.add_argument("--gguf", type=Path, help="the file to load")
    parser.add_argument("--name", default="few_bits")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.gguf:
        write(
            f"{options.name}_loading_{options.gguf.stem}",
            loading(options.gguf, None) | {"machine": machine()},
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        target = random_checkpoint(Path(folder) / "target", SHAPES["llama-1b"], torch.bfloat16)
        if options.loading:
            found = loading(target, None if options.loading == "none" else options.loading)
            write(f"{options.name}_loading_{options.loading}", found | {"machine": machine()})
            return
        peers = partial(start_peers, folder=target, openvino=options.openvino)
        figures = passes(target, options.repeats, peers if options.peers else lambda llm: {})
        write(options.name, {"what": vars(options), "machine": machine(), **figures})


if __name__ == "__main__":
    main()
