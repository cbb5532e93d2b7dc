"""Types of GGUF files: a step of weights that are kept coded, beside one of the same weights expanded.

Files of a real model in several types are made by ik_llama.cpp's `llama-quantize` (the package
ik-llama-cpp-python). Each file is loaded twice, coded and expanded to bfloat16, and both take turns after a
warm-up. A ratio is the median of the ratios within the turns, with quartiles; above 1, coded weights win.
Then the memory of loading a file, in a process of its own, is held against the size of its coded weights.

    python benchmarks/gguf_types.py MODEL.gguf --name gguf_types_smollm2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from loading import loading_memory
from timing import interleaved, spread
from workload import machine, write

import foredraft
from foredraft.model.hub import resolve
from foredraft.model.quantisation import Codes
from foredraft.model.runner import Runner
from foredraft.model.runner.native import pack_native
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, weight_bytes
from tests.support.real_models import requantised

KINDS = ("Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
ROWS = (1, 4, 8)
CONTEXT, POSITIONS = 128, 512  # tokens in the KV cache before a pass, and its room


def expanded(file: Path) -> Runner:
    """Return the model of a file with all weights expanded, under the same kernels."""
    from foredraft.model.runner.native import codes

    def pack(found: Codes, dtype: torch.dtype, bias: Any, arena: Any = None) -> Any:
        return pack_native(found.expand(dtype), bias, arena)

    from foredraft.model import weights

    before, weights.pack_codes = codes.pack_codes, pack
    try:
        return Runner(load_decoder(resolve(file), dtype=torch.bfloat16, native=True))
    finally:
        weights.pack_codes = before


def compare(file: Path, repeats: int) -> dict[str, Any]:
    """Time passes of a file's model, coded and expanded."""
    runners = {
        "coded": Runner(load_decoder(resolve(file), dtype=torch.bfloat16, native=True)),
        "expanded": expanded(file),
    }
    works: dict[Any, Any] = {}
    for name, runner in runners.items():
        cache = runner.new_cache(1, POSITIONS)
        for rows in ROWS:
            tokens = torch.zeros(1, rows, dtype=torch.int64)
            works[name, rows] = lambda runner=runner, cache=cache, tokens=tokens: runner.forward(
                cache, tokens, [CONTEXT]
            )
    seconds = interleaved(works, torch.device("cpu"), repeats)

    def ratio(rows: int) -> list[float]:
        pairs = zip(seconds["expanded", rows], seconds["coded", rows], strict=True)
        return [expanded / coded for expanded, coded in pairs]

    return {
        "megabytes": file.stat().st_size / 1e6,
        "milliseconds": {rows: spread([1e3 * s for s in seconds["coded", rows]]) for rows in ROWS},
        "expanded_over_coded": {rows: spread(ratio(rows)) for rows in ROWS},
    }


def loading(file: Path) -> dict[str, Any]:
    """Return the memory of loading a file, beside that of its weights."""
    spec = ModelSpec.from_folder(resolve(file))
    size = weight_bytes(spec, torch.device("cpu"), torch.bfloat16, native=True)
    foredraft.load(device="cpu", drafter="none", max_batch=1, max_length=64)  # what loading touches once
    load = lambda: foredraft.load(file, device="cpu", drafter="none", max_batch=1, max_length=64)  # noqa: E731
    return loading_memory(load) | {"weight_bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the types of GGUF files.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--loading", action="store_true", help="only load the file, in this process")
    parser.add_argument("--name", default="gguf_types")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.loading:
        print(json.dumps(loading(options.file)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            file = requantised(options.file, f"pure {kind}", Path(folder))
            command = [sys.executable, __file__, str(file), "--loading"]
            ran = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind] = compare(file, options.repeats) | {
                "loading": json.loads(ran.stdout.splitlines()[-1])
            }
            file.unlink()
            print(kind, found[kind], flush=True)
    write(options.name, {"model": options.file.name, "machine": machine(), "types": found})


if __name__ == "__main__":
    main()
