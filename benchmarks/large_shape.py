"""Costs at a real model's shape, where reading the weights is what takes time: bare forwards by rows, plain
decoding, host work a round, and the memory that loading takes.

A checkpoint of 1.24 billion random weights (`shape.py`), beside transformers and, where it is installed,
llama.cpp on the same weights; how fast memory can be read is measured in the same turns. Everything takes
turns, warm; a ratio is the median of those within the turns, with quartiles.

    python benchmarks/large_shape.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shape import SHAPES, random_checkpoint
from timing import interleaved, spread
from workload import machine, write

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.bench.contender import BenchContext
from foredraft.bench.figures import divergence
from foredraft.bench.hugging_face import Checkpoints, plain
from foredraft.bench.llama_cpp import LlamaCpp
from foredraft.bench.timing import parted, watched
from foredraft.bench.weights import weigh
from foredraft.errors import ForedraftError

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT, POSITIONS = 128, 512
READ = 2**30  # bytes
# a draft model of the same vocabulary, for rounds to have drafts at all
DRAFT = {**SHAPES["llama-1b"], "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
HOST: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled, speculative": {**SAMPLED, "acceptance": "speculative"},
    "sampled, coupled": {**SAMPLED, "acceptance": "coupled"},
}


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.dtype = getattr(torch, options.dtype)
        self.repeats, self.new_tokens, self.kernels = options.repeats, options.new_tokens, options.kernels
        self.target = random_checkpoint(folder / "target", SHAPES["llama-1b"], self.dtype)
        self.draft = random_checkpoint(folder / "draft", DRAFT, self.dtype)

    def load(self, **options: Any) -> LLM:
        return foredraft.load(
            self.target,
            device="cpu",
            max_batch=1,
            max_length=POSITIONS,
            kernels=self.kernels,
            policy="fixed",
            **options,
        )

    def setting(self, llm: LLM) -> BenchContext:
        return BenchContext(llm, self.target, None, self.dtype, torch.device("cpu"), POSITIONS)

    def forwards(self) -> dict[str, Any]:
        """Ours and llama.cpp's by rows, in turns with reading memory."""
        llm = self.load()
        runner: Any = llm.engine.target
        cache, memory = runner.new_cache(1, POSITIONS), torch.ones(READ // 4)
        made = {rows: torch.zeros(1, rows, dtype=torch.int64) for rows in ROWS}
        works: dict[Any, Callable[[], object]] = {"read": memory.sum}
        works |= {
            ("foredraft", rows): lambda tokens=tokens: runner.forward(cache, tokens, [CONTEXT])  # type: ignore[misc]
            for rows, tokens in made.items()
        }
        peer = _llama_cpp(self.setting(llm))
        own: dict[Any, list[float]] = {}
        if peer is not None:
            for rows in ROWS:  # timed by itself, for it reads a context first
                own[("llama.cpp", rows)] = []
                works[("llama.cpp", rows)] = lambda rows=rows: own[("llama.cpp", rows)].append(  # type: ignore[misc]
                    peer.forward_seconds(rows, CONTEXT)
                )
        seconds = interleaved(works, torch.device("cpu"), self.repeats)
        if peer is not None:
            peer.close()
        seconds |= {key: taken[-self.repeats :] for key, taken in own.items()}
        step, read = seconds["foredraft", 1], seconds["read"]
        size = weigh("target", "target", runner).step_bytes
        return {
            "seconds": {" ".join(map(str, key)) if isinstance(key, tuple) else key: spread(taken)
                        for key, taken in seconds.items()},
            "v": {rows: _ratio(seconds["foredraft", rows], step) for rows in ROWS},
            "bytes_per_step": size,
            "read_bytes_per_second": {"best": READ / min(read), "median": READ / median(read)},
            "share_of_best_read": {"median_step": size / median(step) / (READ / min(read)),
                                   "best_step": size / min(step) / (READ / min(read))},
            "share_of_the_turns_own_read": spread(
                [size / one / (READ / other) for one, other in zip(step, read, strict=True)]
            ),
            "llama.cpp_over_foredraft": None if peer is None else {
                rows: _ratio(seconds["llama.cpp", rows], seconds["foredraft", rows]) for rows in ROWS
            },
        }  # fmt: skip

    def decoding(self) -> dict[str, Any]:
        """Plain decoding of one prompt, ours and transformers'."""
        llm = self.load()
        setting = self.setting(llm)
        theirs = plain(Checkpoints(setting), setting)
        prompt = [[100 + i for i in range(32)]]
        params = SamplingParams(temperature=0, max_new_tokens=self.new_tokens, ignore_eos=True)
        runs: dict[str, list[tuple[float, list[int]]]] = {"foredraft": [], "transformers": []}
        for _ in range(self.repeats + 1):
            timing = theirs.run(prompt, self.new_tokens)
            runs["transformers"].append((timing.decode_seconds / timing.decoded, list(timing.tokens[0])))
            [output] = llm.generate(prompt, params)
            runs["foredraft"].append((output.stats.seconds / len(output.token_ids), output.token_ids))
        seconds = {name: [taken for taken, _ in several[1:]] for name, several in runs.items()}
        ours = [ids for _, ids in runs["foredraft"]]
        return {
            "seconds_per_token": {name: spread(taken) for name, taken in seconds.items()},
            "transformers_over_foredraft": _ratio(seconds["transformers"], seconds["foredraft"]),
            "ours_the_same_every_time": all(ids == ours[0] for ids in ours),
            "first_difference_from_transformers": divergence(ours[0], runs["transformers"][0][1]),
        }

    def host(self) -> dict[str, Any]:
        """What is left of real rounds without the two models' forwards: eight rows verified."""
        llm = self.load(draft=self.draft, max_draft=7)
        results = {}
        for name, how in HOST.items():
            taken = []
            for turn in range(4):
                params = SamplingParams(
                    max_new_tokens=self.new_tokens, ignore_eos=True, drafter="draft-model", **how
                )
                with watched(llm.engine) as clock, parted(llm.engine) as parts:
                    llm.generate([[100 + i for i in range(32)]], params)
                if turn:
                    whole = clock.ended - clock.began - clock.reading_since
                    taken.append((whole - parts.draft - parts.verify) / clock.rounds * 1e3)
            results[name] = {"milliseconds_a_round": spread(taken), "rounds": clock.rounds}
        return results

    def memory(self) -> dict[str, Any]:
        """Anonymous memory while loading, at its most, cache apart."""
        before, over, seen = _anonymous(), threading.Event(), [0]

        def look() -> None:
            while not over.wait(0.002):
                seen.append(_anonymous())

        watcher = threading.Thread(target=look)
        watcher.start()
        llm = self.load()
        over.set()
        watcher.join()
        runner: Any = llm.engine.target
        cache = llm.engine.cache.memory.nbytes
        embedding = runner.decoder.embedding.nbytes
        weights = weigh("target", "target", runner).step_bytes
        peak = max(*seen, _anonymous()) - before - cache
        return {
            "peak": peak,
            "weights": weights,
            "embedding": embedding,
            "share": peak / (weights + embedding),
        }


def _llama_cpp(setting: BenchContext) -> LlamaCpp | None:
    try:
        return LlamaCpp(setting)
    except ForedraftError as error:
        print(f"without llama.cpp: {error}")
        return None


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def _ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, Any]:
    return spread([a / b for a, b in zip(over, under, strict=True)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--stages", default="memory,forwards,decoding,host")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction)
    parser.add_argument("--name", default="large_shape")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"what": vars(options), "machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for stage in options.stages.split(","):
            start = time.perf_counter()
            result[stage] = getattr(bench, stage)()
            result[stage]["took"] = time.perf_counter() - start
    write(f"{options.name}_{options.dtype}", result)


if __name__ == "__main__":
    main()
