"""Costs at a real model's shape, at which memory bandwidth bounds a step.

The script measures bare forwards by rows, plain decoding, host work per round, and the memory that loading
takes. The checkpoint has 1.24 billion random weights (`shape.py`). transformers, and llama.cpp where it is
installed, run on the same weights; reads of memory are timed in the same turns. All contenders take turns
after a warm-up. A ratio is the median of the ratios within the turns, with quartiles.

    python -m benchmarks.large_shape --dtype bfloat16
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import foredraft
from benchmarks.loading import loading_memory
from benchmarks.shape import SHAPES, random_checkpoint
from benchmarks.timing import OwnSeconds, Quiet, interleaved, spread
from benchmarks.workload import machine, write
from foredraft import LLM, SamplingParams
from foredraft.bench.contender import BenchContext
from foredraft.bench.figures import divergence
from foredraft.bench.hugging_face import TransformersModels, plain
from foredraft.bench.llama_cpp import LlamaCpp
from foredraft.bench.model_size import model_record
from foredraft.errors import ForedraftError
from foredraft.profiling.phases import DecodingClock, RoundClock, observed

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT, POSITIONS = 128, 512  # tokens in the KV cache before a bare forward, and its room
READ = 2**30  # bytes read per bandwidth measurement: more than any cache holds
# a small draft model with the same vocabulary, so that rounds have drafts
DRAFT = {**SHAPES["llama-1b"], "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512,
         "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
HOST: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled, speculative": {**SAMPLED, "acceptance": "speculative"},
    "sampled, coupled": {**SAMPLED, "acceptance": "coupled"},
}


class Bench:
    """The options and the checkpoints. Each stage is a method that returns its figures."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.dtype = getattr(torch, options.dtype)
        self.repeats, self.new_tokens, self.kernels = options.repeats, options.new_tokens, options.kernels
        self.target = random_checkpoint(folder / "target", SHAPES["llama-1b"], self.dtype)
        self.draft = random_checkpoint(folder / "draft", DRAFT, self.dtype)

    def load(self, **options: Any) -> LLM:
        """Load the target for one sequence."""
        return foredraft.load(
            self.target,
            device="cpu",
            max_batch=1,
            max_length=POSITIONS,
            kernels=self.kernels,
            policy="fixed",
            **options,
        )

    def context(self, llm: LLM) -> BenchContext:
        return BenchContext(llm, self.target, None, self.dtype, torch.device("cpu"), POSITIONS)

    def forwards(self) -> dict[str, Any]:
        """Time bare forwards of Foredraft and of llama.cpp by rows, in turns with reads of memory."""
        llm = self.load()
        runner = llm.loaded.runner
        cache, memory = runner.new_cache(1, POSITIONS), torch.ones(READ // 4)
        made = {rows: torch.zeros(1, rows, dtype=torch.int64) for rows in ROWS}
        works: dict[Any, Callable[[], object]] = {"read": memory.sum}
        works |= {
            ("foredraft", rows): lambda tokens=tokens: runner.forward(cache, tokens, [CONTEXT])  # type: ignore[misc]
            for rows, tokens in made.items()
        }
        peer = _llama_cpp(self.context(llm))
        if peer is not None:
            for rows in ROWS:  # timed by the contender, which has to fill its KV cache before each forward
                works["llama.cpp", rows] = lambda rows=rows: OwnSeconds(  # type: ignore[misc]
                    peer.forward_seconds(rows, CONTEXT)
                )
        seconds = interleaved(works, torch.device("cpu"), self.repeats)
        if peer is not None:
            peer.close()
        step, read = seconds["foredraft", 1], seconds["read"]
        size = model_record("target", "target", runner).step_bytes
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
        """Time plain decoding of one prompt by Foredraft and by transformers."""
        llm = self.load()
        context = self.context(llm)
        peer = plain(TransformersModels(context), context)
        prompt = [[100 + i for i in range(32)]]
        params = SamplingParams(temperature=0, max_new_tokens=self.new_tokens, ignore_eos=True)
        runs: dict[str, list[tuple[float, list[int]]]] = {"foredraft": [], "transformers": []}

        def turn() -> dict[str, tuple[float, list[int]]]:
            timing = peer.run(prompt, self.new_tokens)
            theirs = timing.decode_seconds / timing.decoded_tokens, list(timing.tokens[0])
            [output] = llm.generate(prompt, params)
            ours = output.stats.seconds / len(output.token_ids), output.token_ids
            return {"transformers": theirs, "foredraft": ours}

        turn()
        quiet = Quiet(self.repeats)
        for _ in range(self.repeats):
            for name, taken in quiet.take(turn).items():
                runs[name].append(taken)
        seconds = {name: [taken for taken, _ in several] for name, several in runs.items()}
        outputs = [ids for _, ids in runs["foredraft"]]
        return {
            "seconds_per_token": {name: spread(taken) for name, taken in seconds.items()},
            "transformers_over_foredraft": _ratio(seconds["transformers"], seconds["foredraft"]),
            "ours_the_same_every_time": all(ids == outputs[0] for ids in outputs),
            "first_difference_from_transformers": divergence(outputs[0], runs["transformers"][0][1]),
        }

    def host(self) -> dict[str, Any]:
        """Time the host work of rounds with 7 drafted tokens: all but the forwards of the two models."""
        llm = self.load(draft=self.draft, max_draft=7)
        results = {}
        for name, options in HOST.items():
            milliseconds = []
            for turn in range(4):
                params = SamplingParams(
                    max_new_tokens=self.new_tokens, ignore_eos=True, drafter="draft-model", **options
                )
                engine = llm.loaded.engine
                clock, parts = DecodingClock(engine), RoundClock(engine)
                with observed(engine, parts), observed(engine, clock):
                    llm.generate([[100 + i for i in range(32)]], params)
                if turn:  # the first one warms up
                    seconds = clock.ended - clock.began - clock.reading_since
                    forwards = parts.seconds["draft"] + parts.seconds["verify"]
                    milliseconds.append((seconds - forwards) / clock.rounds * 1e3)
            results[name] = {"milliseconds_a_round": spread(milliseconds), "rounds": clock.rounds}
        return results

    def memory(self) -> dict[str, Any]:
        """Measure the peak of anonymous memory while loading."""
        return loading_memory(self.load)


def _llama_cpp(context: BenchContext) -> LlamaCpp | None:
    try:
        return LlamaCpp(context)
    except ForedraftError as error:
        print(f"without llama.cpp: {error}")
        return None


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
