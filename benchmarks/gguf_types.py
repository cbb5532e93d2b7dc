"""Types of GGUF files that the kernels keep coded: products, beside those of the same weights expanded.

For each type one weight of random blocks is packed coded and expanded to bfloat16. So many copies of both
lie in memory that no cache holds them, and their products take turns after a warm-up. A ratio is the median
of the ratios within the turns, with quartiles; above 1, coded weights win. With `--loading FILE` the peak of
memory while a file is loaded is held against the size of its weights.

    python -m benchmarks.gguf_types
    python -m benchmarks.gguf_types --loading MODEL.gguf --name gguf_loading_smollm2
    python -m benchmarks.gguf_types --peer MODEL.gguf --name gguf_peer_smollm2

With `--peer FILE` plain steps and short passes of a model take turns with llama.cpp's on the same file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.loading import anonymous_peak
from benchmarks.timing import OwnSeconds, interleaved, spread
from benchmarks.workload import machine, write
from foredraft.bench.contender import BenchContext
from foredraft.bench.llama_cpp import LlamaCpp
from foredraft.model.hub import resolve
from foredraft.model.quantisation.blocks import BLOCKS
from foredraft.model.quantisation.gguf import GGUFFormat
from foredraft.model.runner.native import pack_codes, pack_native
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, weight_bytes
from tests.support.gguf_files import random_blocks

SHAPE = (5632, 2048)
COPIES = 32  # 369 million weights: 738 MB in bfloat16
ROWS = (1, 4, 8, 16)
CONTEXT = 128  # tokens in the KV cache before a pass of a model


def products(kind: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, list[Any]]:
    """Return copies of the product with a weight of random blocks, coded and expanded."""
    stored = torch.from_numpy(random_blocks(kind, SHAPE))
    codes = GGUFFormat(kind).codes(SHAPE, {"weight": stored})
    packed: dict[str, Any] = {
        "coded": pack_codes(codes, dtype, None),
        "expanded": pack_native(codes.expand(dtype), None),
    }
    return {
        name: [replace(product, weight=product.weight.clone()) for _ in range(COPIES)]
        for name, product in packed.items()
    }


def compare(kind: str, repeats: int) -> dict[str, Any]:
    """Time the products of a type by rows of inputs."""
    works: dict[Any, Any] = {}
    for name, copies in products(kind).items():
        for rows in ROWS:
            x = torch.randn(rows, SHAPE[1]).bfloat16()
            works[name, rows] = lambda copies=copies, x=x: [product(x) for product in copies]
    seconds = interleaved(works, torch.device("cpu"), repeats)

    def ratios(rows: int) -> list[float]:
        pairs = zip(seconds["expanded", rows], seconds["coded", rows], strict=True)
        return [expanded / coded for expanded, coded in pairs]

    return {
        "milliseconds": {rows: spread([1e3 * s for s in seconds["coded", rows]]) for rows in ROWS},
        "expanded_over_coded": {rows: spread(ratios(rows)) for rows in ROWS},
    }


def loading(file: Path) -> dict[str, Any]:
    """Return the memory of loading a file's weights, as a share of their size."""
    foredraft.load(device="cpu", drafter="none", max_batch=1, max_length=64)  # what loading touches once
    folder = resolve(file)
    spec = ModelSpec.from_folder(folder)
    kept, peak = anonymous_peak(lambda: load_decoder(folder, dtype=torch.bfloat16, native=True))
    size = weight_bytes(spec, torch.device("cpu"), torch.bfloat16, native=True)
    return {"layers": len(kept.layers), "peak": peak, "weights": size, "share": peak / size}


def beside_peer(file: Path, repeats: int) -> dict[str, Any]:
    """Time passes of a file's model by rows of inputs, beside llama.cpp's."""
    with foredraft.load(file, device="cpu", drafter="none", max_batch=1, max_length=512) as llm:
        target = llm.loaded.runner
        cache = target.new_cache(1, 512)
        peer = LlamaCpp(BenchContext(llm, resolve(file), None, torch.bfloat16, torch.device("cpu"), 512))
        works: dict[Any, Any] = {}
        for rows in ROWS[:3]:
            tokens = torch.zeros(1, rows, dtype=torch.int64)
            works[rows] = lambda tokens=tokens: target.forward(cache, tokens, [CONTEXT])
            works["llama.cpp", rows] = lambda rows=rows: OwnSeconds(peer.forward_seconds(rows, CONTEXT))
        seconds = interleaved(works, torch.device("cpu"), repeats)
        peer.close()
    found = {}
    for rows in ROWS[:3]:
        ratios = [a / b for a, b in zip(seconds["llama.cpp", rows], seconds[rows], strict=True)]
        own = spread([1e3 * each for each in seconds[rows]])
        found[rows] = {"milliseconds": own, "peer_over_foredraft": spread(ratios)}
    return {"passes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the types of GGUF files.")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--loading", type=Path, help="only load this file")
    parser.add_argument("--name", default="gguf_types")
    parser.add_argument("--peer", type=Path, help="time a model beside llama.cpp on this file")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.peer is not None:
        found = beside_peer(options.peer, options.repeats)
        write(options.name, {"machine": machine(), "file": options.peer.name} | found)
        return
    if options.loading is not None:
        write(options.name, {"machine": machine(), "file": options.loading.name} | loading(options.loading))
        return
    kinds = [kind for kind, block in BLOCKS.items() if block.coding is not None]
    types = {kind: compare(kind, options.repeats) for kind in kinds}
    write(options.name, {"shape": SHAPE, "copies": COPIES, "machine": machine(), "types": types})


if __name__ == "__main__":
    main()
