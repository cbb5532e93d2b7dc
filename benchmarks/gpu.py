"""All measurements on one GPU, at batch size 1: an 8 B Llama shape with random bfloat16 weights.

The stages run in this order; a stage that fails is reported in the result, and the others still run:

  tests         the tests that need a GPU
  verify        `foredraft verify` on the demo models
  forwards      bare forwards over 1 to 32 rows, with `deterministic` on and off
  plain         plain decoding through the engine, in turns with transformers' `generate` on the same weights
                (dynamic cache, static cache, static cache with torch.compile), and the share of the device's
                copy bandwidth that each reaches
  arranged-0.6, arranged-0.8, arranged-0.9
                drafting with a draft model whose tokens are accepted with that probability (random_model.py
                explains how), in turns with plain decoding: the measured speed-up over the predicted
                S = tau / (k c + v(k + 1)) at the runs' own tau and draft lengths, with the best length k for
                this c, v and alpha; and whether the token ids are identical
  demo          `foredraft bench` on the demo models: every method that can run, and transformers' own
                assisted generation and prompt lookup
  vllm          vLLM's plain decoding of the same shape, where it is installed

Beside the JSON lies a page of the same name, results/gpu.md, which says what to look at first.

The copy bandwidth is bytes read plus bytes written per second, the best of 20 copies of 1 GiB. A plain step
reads the KV cache and every weight except the embedding, in which it looks up one row. Timers are read when
the device has finished. Contenders take turns after a warm-up. Figures are medians with quartiles.

    python -m benchmarks.gpu                                   # all stages
    python -m benchmarks.gpu --stages plain --name gpu_plain   # one stage, with a result file of its own
    python -m benchmarks.gpu --stages arranged-0.6,arranged-0.8 --name gpu_arranged
    python -m benchmarks.gpu --shape tiny --device cpu --dtype float32 --new-tokens 16 --repeats 1
    python -m tests.rehearsal.script benchmarks.gpu --shape tiny --dtype float32 ...   # on a pretended GPU
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu_page import page
from benchmarks.gpu_stages import STAGES, Bench, failure, say
from benchmarks.random_model import SHAPES
from benchmarks.workload import HERE, machine, write
from foredraft.errors import ConfigError
from foredraft.files import write_whole
from foredraft.loading.runners import find_device


@contextmanager
def memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the peak of the device's memory while entered, after releasing unused memory."""
    used: dict[str, Any] = {}
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield used
    if cuda:
        used["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES), help="joined by commas")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=3, help="of the stages verify, arranged-* and demo")
    parser.add_argument("--samples", type=int, help="of each test of stage verify; default: by its power")
    parser.add_argument("--max-draft", type=int, default=8, help="longest draft to consider, in tokens")
    parser.add_argument("--backend", default="inductor", help="of torch.compile, for transformers")
    parser.add_argument(
        "--compile", action="store_true", help="compile Foredraft's models; adds a contender to stage plain"
    )
    parser.add_argument("--name", default="gpu", help="of the result file")
    options = parser.parse_args(arguments)
    if unknown := [stage for stage in options.stages.split(",") if stage not in STAGES]:
        parser.error(f"--stages has {unknown[0]!r}; give some of {','.join(STAGES)}")
    try:
        find_device(options.device)
    except ConfigError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    bench = Bench(options)
    result: dict[str, Any] = {
        "what": vars(options),
        "machine": machine(bench.device),
        "bandwidth": bench.bandwidth and asdict(bench.bandwidth),
        "stages": {},
    }
    failed = False
    for stage in options.stages.split(","):
        say(f"{stage} ...")
        start = time.perf_counter()
        with memory(bench.device) as used:
            try:
                found = STAGES[stage](bench)
            except Exception as error:
                found, failed = failure(error), True
        taken = {"seconds": time.perf_counter() - start} | used
        result["stages"][stage] = found | taken
        write(options.name, result)  # after every stage, because a time limit may end the next one
        write_whole(HERE / "results" / f"{options.name}.md", page(result), "the page")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
