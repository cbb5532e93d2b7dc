"""Plain decoding on a machine that others use: one thread and several, beside 0, 1, 2 and 4 busy processes.

Every contender is a process of its own with the same model; they decode the same prompt in turns, and those
that wait sleep. `pinned` is one busy process that stays on one core, which halves it. Beside each figure in
tokens/s stand its ratios, within the turns, to one thread and to the share that the system gives to as many
threads: with k busy processes on n cores, t threads of t + k get n / (t + k) of a core each, and it is
measured by what as many threads do idle. The texts must be equal. At last two processes decode at once: what
they write together over what one writes alone.

    python -m benchmarks.busy --target SMOLLM2 --old ../before --llama-cpp FOLDER --gguf FILE

`--old` is a working tree of another version, as for versions.py; `--llama-cpp` a folder of llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.contending import WORKER, Contender, answer
from benchmarks.neighbours import busy

HERE = Path(__file__).resolve().parent
PROMPT = "def fibonacci(n):\n"
PINNED, LLAMA = "pinned", "threads, llama.cpp"
POSITIONS = 1024


def work(options: dict[str, Any]) -> None:
    """Answer each number of tokens with the seconds that they take, and their text."""
    decode = (by_llama_cpp if options["llama"] else by_foredraft)(options["model"], options["threads"])

    def timed(tokens: int) -> tuple[float, str]:
        started = time.perf_counter()
        text = decode(tokens)
        return time.perf_counter() - started, text

    answer(timed)


def by_foredraft(model: str, threads: int) -> Any:
    """Return what decodes so many tokens by the package that Python finds."""
    import torch

    import foredraft

    torch.set_num_threads(threads)
    llm = foredraft.load(model, device="cpu", drafter="none", max_length=POSITIONS)

    def decode(tokens: int) -> str:
        params = llm.params(temperature=0, max_new_tokens=tokens, ignore_eos=True)
        return llm.generate([PROMPT], params)[0].text

    return decode


def by_llama_cpp(model: str, threads: int) -> Any:
    """Return what decodes so many tokens by llama.cpp."""
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=POSITIONS, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(tokens: int) -> str:
        llama.reset()
        return str(llama(PROMPT, max_tokens=tokens, temperature=0.0)["choices"][0]["text"])

    return decode


def contender(model: str, threads: int, *folders: str, llama: bool = False) -> Contender:
    """Return a process that decodes."""
    return Contender("benchmarks.busy", {"model": model, "threads": threads, "llama": llama}, *folders)


def beside(load: str) -> AbstractContextManager[None]:
    """Run so many processes that never wait, or one on the last core alone."""
    if load == PINNED:
        return busy(1, core=max(os.sched_getaffinity(0)))
    return busy(int(load))


def share(load: str, threads: int) -> float:
    """Return the part of a core that the system gives to each of so many threads beside a load."""
    cores = len(os.sched_getaffinity(0))
    return min(1.0, cores / (threads + int(load)))


def side_by_side(one: Contender, other: Contender, tokens: int, turns: int) -> list[float]:
    """Return the tokens/s of two processes that decode at the same time over those of one alone, by turns."""
    ratios = []
    for turn in range(turns + 1):
        alone, _ = one.ask(tokens)
        one.start(tokens)
        other.start(tokens)
        together = max(one.result()[0], other.result()[0])
        if turn:  # the first one warms
            ratios.append(2 * alone / together)
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True, help="a checkpoint folder or a GGUF file")
    parser.add_argument("--old", help="a working tree of another version")
    parser.add_argument("--llama-cpp", help="a folder that holds llama-cpp-python")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", default=f"0,1,2,4,{PINNED}")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--name", default="busy")
    options = parser.parse_args(arguments)
    from benchmarks.timing import spread
    from benchmarks.workload import machine, write

    new, many = str(HERE.parent / "src"), options.threads
    processes = {
        "one thread": (contender(options.target, 1, new), 1),
        "threads": (contender(options.target, many, new), many),
    }
    if options.old:
        processes["threads, old"] = contender(options.target, many, str(Path(options.old) / "src")), many
    if options.llama_cpp:
        gguf = options.gguf or options.target
        processes[LLAMA] = contender(gguf, many, options.llama_cpp, llama=True), many
    result: dict[str, Any] = {"what": dict(vars(options)), "machine": machine(), "loads": {}}
    idle: dict[str, float] = {}
    for load in options.loads.split(","):
        rates: dict[str, list[float]] = defaultdict(list)
        texts: dict[str, set[str]] = defaultdict(set)
        with beside(load):
            for turn in range(options.turns + 1):
                for name, (process, _) in processes.items():
                    seconds, text = process.ask(options.tokens)
                    texts[name].add(text)
                    if turn:  # the first one warms
                        rates[name].append(options.tokens / seconds)
        figures: dict[str, Any] = {}
        for name, (_, threads) in processes.items():
            ratios = [own / one for own, one in zip(rates[name], rates["one thread"], strict=True)]
            found = {"tokens_per_second": spread(rates[name]), "over_one_thread": spread(ratios)}
            if load == "0":
                idle[name] = found["tokens_per_second"]["median"]
            elif load != PINNED:
                fair = idle[name] * share(load, threads)
                found["over_fair_share"] = spread([rate / fair for rate in rates[name]])
            if name != LLAMA:
                found["identical"] = texts[name] == texts["one thread"] and len(texts[name]) == 1
            figures[name] = found
        result["loads"][load] = figures
        print(load, {name: round(each["tokens_per_second"]["median"], 1) for name, each in figures.items()})
    one, twin = processes["threads"][0], contender(options.target, many, new)
    result["two_at_once_over_one"] = spread(side_by_side(one, twin, options.tokens, options.turns))
    for process in (twin, *(process for process, _ in processes.values())):
        process.close()
    write(options.name, result)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(json.loads(sys.argv[2]))
    else:
        main()
