"""What drafter `suffix` takes on texts that are new: `auto` with it and its memory beside `auto` without.

Every prompt is decoded once by each contender, so that no text comes again; the texts of the prompts before
are remembered. The contenders have models of their own and run at once, a slice of some rounds at a time in
turns. Figures are seconds of the same request, with the drafter over without it: medians and quartiles.

    free         fluent text of the workload `free`, whose output repeats little
    edit-file    edits of files, which copy much of the prompt

    python -m benchmarks.texts --layers 48
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import foredraft
from benchmarks.auto import POSITIONS, SLICE, Contender, Running
from benchmarks.timing import spread
from benchmarks.workload import DEMO_LAYERS, fluent, machine, padded_demo, write
from foredraft import LLM, SamplingParams, demo
from foredraft.decode.stats import Stats

WORKLOADS = ("free", "edit-file")
WITH, WITHOUT, PLAIN = "auto, with suffix", "auto", "plain"


def loaded(model: str) -> dict[str, LLM]:
    """Return the models of all contenders, by name."""
    common: dict[str, Any] = {"device": "cpu", "max_batch": 1, "max_length": POSITIONS}
    return {
        PLAIN: foredraft.load(model, **common, drafter="none"),
        WITHOUT: foredraft.load(model, **common),
        WITH: foredraft.load(model, **common, recent_texts=64),
    }


def measure(models: dict[str, LLM], workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let all contenders decode every prompt of a workload once; return their figures."""
    params = SamplingParams(temperature=0, max_new_tokens=options.new_tokens, ignore_eos=True)
    chance, seconds = random.Random(0), {name: list[float]() for name in models}
    stats: dict[str, list[Stats]] = {name: [] for name in models}
    identical = True
    for prompt in fluent(models[PLAIN], options.prompts, workload):
        running = {}
        for name, llm in models.items():
            policy = llm.loaded.engine.policy
            drafter = "none" if name == PLAIN else "auto"
            running[name] = Running(Contender(llm, lambda own=policy: own, drafter), [prompt], params)
        order = list(running.values())
        while order:
            chance.shuffle(order)
            for each in order:
                each.go_on(SLICE)
            order = [each for each in order if not each.done]
        plain = running[PLAIN].outputs()[0].token_ids
        for name, each in running.items():
            [output] = each.outputs()
            identical &= output.token_ids == plain
            seconds[name].append(each.seconds)
            stats[name].append(output.stats)
    ratios = [one / other for one, other in zip(seconds[WITH], seconds[WITHOUT], strict=True)]
    return {
        "workload": workload,
        "identical": identical,
        "with_over_without": spread(ratios),
        "overall": sum(seconds[WITH]) / sum(seconds[WITHOUT]),
        "step_ms": 1e3 * sum(seconds[PLAIN]) / (options.new_tokens * len(ratios)),
        "speedup_over_plain": {name: sum(seconds[PLAIN]) / sum(own) for name, own in seconds.items()},
        "mean_accepted_length": {
            name: Stats.merge(own).mean_accepted_length for name, own in stats.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=WORKLOADS)
    parser.add_argument("--name", default="texts")
    options = parser.parse_args()
    with torch.inference_mode(), TemporaryDirectory() as folder:
        model = str(demo.target_path())
        if options.layers > DEMO_LAYERS:
            model = str(padded_demo(Path(folder) / "target", options.layers))
        models = loaded(model)
        cases = [measure(models, workload, options) for workload in options.workloads]
    write(options.name, {"what": vars(options), "machine": machine(), "cases": cases})


if __name__ == "__main__":
    main()
