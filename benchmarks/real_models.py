"""Two models that this project did not make, beside llama.cpp on the same files.

SmolLM2-135M-Instruct and Gemma 3 270M, in bfloat16, Q8_0, Q4_0 and Q4_K_M; the packages of
tests/real/requirements.txt bring them and make the types. Each program is a process of its own with two
threads; they work in turns, and the one that waits sleeps. Foredraft's figures stand beside the ratios within
the turns; above 1, Foredraft is faster.

    decoding   tokens/s without drafts, after a function's head; and beside 1, 2 and 4 busy processes
    prompt     seconds until 256 and 1,024 tokens are read
    pass       milliseconds of passes of 2, 4, 8 and 16 rows after 128 tokens
    drafters   tokens/s over plain decoding's on functions of HumanEval and on chat, with drafters that need
               no training: each by itself, and `auto`; the ids must be plain decoding's

    pip install --no-deps -r tests/real/requirements.txt
    python -m benchmarks.real_models --work FOLDER --llama-cpp FOLDER

`--work` keeps the files that are made, and the plans of `foredraft tune`; `--llama-cpp` has llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import foredraft
from benchmarks.contending import TREE, WORKER, Contender, answer
from benchmarks.neighbours import busy
from benchmarks.timing import Quiet, spread
from benchmarks.workload import machine, write
from foredraft import LLM, RequestError
from foredraft.bench.contender import BenchContext
from foredraft.bench.contenders import CONTENDERS, PROGRAMS
from foredraft.model.hub import resolve
from tests.support.real_models import gemma, prompts, requantised, smollm2

TYPES = {"bfloat16": "BF16", "8 bits": "Q8_0", "4 bits": "Q4_0", "4 bits, K": "Q4_K_M"}
POSITIONS, CONTEXT, THREADS = 1280, 128, 2
LENGTHS, ROWS = (256, 1024), (2, 4, 8, 16)
PASSES = 8  # of one kind, in a turn
FUNCTIONS = 6  # prompts of a kind
CHAT = (
    "Explain in a few paragraphs why the sky is blue, and why sunsets are red.",
    "Write a letter to a landlord who has not repaired the heating.",
    "What are three good habits for a person who wants to learn a language?",
    "Rewrite in simple words: The committee deferred its decision pending further review of the evidence.",
    "Give me a recipe for lentil soup, with a list of what to buy.",
    "Summarise the plot of Romeo and Juliet for a child.",
)
# Drafters that neither a second model nor a training needs, where a file has them: one of 4 bits has no copy.
DRAFTERS = ("lookup", "low-bit", "layer-skip", "auto")


def chat_and_code(llm: LLM, count: int) -> list[list[int]]:
    """Return so many prompts, as token ids: those of CHAT and beginnings of functions, in turn."""
    assert llm.tokenizer is not None
    chat = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in CHAT]
    code = llm.encode(prompts(count - len(chat)))
    return [each for pair in zip(chat, code, strict=False) for each in pair] + code[len(chat) :]


def work(options: dict[str, Any]) -> None:
    """Answer requests, which are the name of a method and its arguments."""
    worker = Worker(Path(options["file"]), llama=options["llama"])

    def to(request: list[Any]) -> Any:
        name, *arguments = request
        return getattr(worker, name)(*arguments)

    answer(to)


class Worker:
    """A loaded file in one of the two programs."""

    def __init__(self, file: Path, *, llama: bool) -> None:
        torch.set_num_threads(THREADS)
        plainly: dict[str, Any] = {"drafter": "none", "policy": "fixed"} if llama else {}
        self.llm = foredraft.load(file, device="cpu", max_batch=1, max_length=POSITIONS, **plainly)
        context = BenchContext(self.llm, resolve(file), None, torch.bfloat16, torch.device("cpu"), POSITIONS)
        if llama:
            self.peer: Any = PROGRAMS["llama.cpp"].load(context)
            self.contenders: dict[str, Any] = {"plain": self.peer}
            return
        loaded = [name for name in DRAFTERS if name in (*context.drafters, "auto")]
        self.peer = None
        self.contenders = {name: CONTENDERS[name].make(self.llm, context) for name in ("plain", *loaded)}

    def encode(self, text: str, chat: bool) -> list[int]:
        """Return the ids of a text, or of a message with it if the model has a template."""
        if chat and self.llm.tokenizer is not None:
            with suppress(RequestError):  # no template
                return self.llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        return self.llm.encode([text])[0]

    def methods(self) -> list[str]:
        return [*self.contenders]

    def run(self, method: str, prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
        """Return the seconds of the prompt, the tokens/s after it, and the new ids."""
        timing = self.contenders[method].run([prompt], tokens)
        return timing.prefill_seconds, timing.tokens_per_second, list(timing.tokens[0])

    def forward(self, rows: int) -> float:
        """Return the median seconds of a pass over so many rows."""
        return statistics.median(self._forward(rows) for _ in range(PASSES))

    def _forward(self, rows: int) -> float:
        if self.peer is not None:
            return float(self.peer.forward_seconds(rows, CONTEXT))
        target: Any = self.llm.loaded.runner
        cache, tokens = target.new_cache(1, POSITIONS), torch.zeros(1, rows, dtype=torch.int64)
        target.forward(cache, tokens, [CONTEXT])
        started = time.perf_counter()
        target.forward(cache, tokens, [CONTEXT])
        return time.perf_counter() - started


class Comparison:
    """Foredraft and llama.cpp on one file, each asked in turn."""

    def __init__(self, file: Path, llama: str, turns: int) -> None:
        src = TREE / "src", TREE
        self.own = Contender("benchmarks.real_models", {"file": str(file), "llama": False}, *src)
        self.peer = Contender("benchmarks.real_models", {"file": str(file), "llama": True}, *src, llama)
        self.turns = turns

    def beside(
        self,
        request: list[Any],
        figure: Callable[[Any], float],
        turns: int | None = None,
        *,
        rate: bool = False,
    ) -> dict[str, Any]:
        """Return the figure of both programs by turns; `rate` says that more of it is faster."""
        turns = turns or self.turns
        quiet = Quiet(turns)
        found: dict[str, list[float]] = defaultdict(list)
        ratios = []
        for turn in range(-1, turns):
            own, peer = quiet.take(lambda: (figure(self.own.ask(request)), figure(self.peer.ask(request))))
            if turn >= 0:  # the first one warms
                found["own"].append(own)
                found["llama.cpp"].append(peer)
                ratios.append(own / peer if rate else peer / own)
        return {name: spread(figures) for name, figures in found.items()} | {"over_peer": spread(ratios)}

    def drafters(self, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
        """Return the gain of each drafter over plain decoding, on the same prompts in turns."""
        methods: list[str] = self.own.ask(["methods"])
        gains: dict[str, list[float]] = defaultdict(list)
        same: dict[str, int] = defaultdict(int)
        for prompt in prompts[:1] * 2:  # warm
            for method in methods:
                self.own.ask(["run", method, prompt, tokens])
        for prompt in prompts:
            found = {method: self.own.ask(["run", method, prompt, tokens]) for method in methods}
            for method in methods[1:]:
                gains[method].append(found[method][1] / found["plain"][1])
                same[method] += found[method][2] == found["plain"][2]
        return {
            method: {"gain": spread(gains[method]), "identical": f"{same[method]} of {len(prompts)}"}
            for method in methods[1:]
        }

    def close(self) -> None:
        self.own.close()
        self.peer.close()


def tuned(file: Path, prompts: Sequence[str], folder: Path, trials: int) -> None:
    """Search the layers that a file can leave out; loading finds the plan afterwards."""
    listed = folder / "functions.jsonl"
    listed.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    command = [Path(sys.executable).with_name("foredraft"), "tune", "--model", file, "--prompts", listed]
    subprocess.run([*command, "--trials", str(trials)], check=False)  # 1 where no plan pays


def figures_of(both: Comparison, options: argparse.Namespace, functions: Sequence[str]) -> dict[str, Any]:
    """Return all figures of a file."""
    code = [both.own.ask(["encode", prompt, False]) for prompt in functions]
    chat = [both.own.ask(["encode", text, True]) for text in CHAT]
    long = [token for prompt in code for token in prompt] * 4
    decode = partial(both.beside, figure=lambda run: run[1], rate=True)
    found: dict[str, Any] = {
        "decoding": {"0": decode(["run", "plain", code[0], options.tokens])},
        "prompt": {n: both.beside(["run", "plain", long[:n], 1], lambda run: run[0]) for n in LENGTHS},
        "pass": {n: both.beside(["forward", n], lambda seconds: 1e3 * seconds) for n in ROWS},
        "drafters": {
            kind: both.drafters(prompts[:FUNCTIONS], options.drafted)
            for kind, prompts in (("HumanEval", code), ("chat", chat))
        },
    }
    for processes in options.busy:
        with busy(processes):
            found["decoding"][str(processes)] = decode(["run", "plain", code[0], 24], turns=4)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--llama-cpp", required=True, help="a folder that holds llama-cpp-python")
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=[*TYPES])
    parser.add_argument("--busy", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafted", type=int, default=128, help="tokens of a text that is drafted")
    parser.add_argument("--trials", type=int, default=40, help="of `foredraft tune`")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--name", default="real_models")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    sources = {"smollm2": smollm2, "gemma3": partial(gemma, options.work)}
    functions = prompts(4 * FUNCTIONS)
    models: dict[str, Any] = {}
    files = {
        (model, label): requantised(sources[model](), TYPES[label], options.work)
        for model in options.models
        for label in options.types
    }
    for model in options.models:
        for label in options.types:
            file = files[model, label]
            if options.trials:
                tuned(file, functions, options.work, options.trials)
            both = Comparison(file, options.llama_cpp, options.turns)
            models.setdefault(model, {})[label] = figures_of(both, options, functions)
            both.close()
            print(model, label, json.dumps(models[model][label]["decoding"]["0"]["over_peer"]))
            write(options.name, {"machine": machine(), "tokens": options.tokens, "models": models})


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(json.loads(sys.argv[2]))
    else:
        main()
