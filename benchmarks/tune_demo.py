"""What a search finds, and what it costs: `foredraft tune` against plans without search.

Runs the whole command's work on the demo target (or another model), then holds its best plan against those
of the greedy ranking and of the dynamic programme, at all their sizes, against random plans of its own size,
and against all that differ from it in one sub-layer or two, by the same texts and the same costs. Beside it:
each stage's seconds; a trial's, by those of a bare forward of the same columns with nothing left out;
predicted and decoded tau; speed-ups with their exactness flag.

The demo target was grown from four of its layers, which any ranking finds. --scaled makes another model of
it, whose sub-layers add more or less than they did, each by a random factor of its own.

    python benchmarks/tune_demo.py --trials 200 --random 1000 --neighbours
    python benchmarks/tune_demo.py --trials 200 --random 1000 --scaled 1 --name tune_scaled
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, combinations
from pathlib import Path
from shutil import copytree
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from timing import spread, timed
from workload import machine, write

import foredraft
from foredraft import demo
from foredraft.cli.tune import prompts_of
from foredraft.drafters.skips import Skips
from foredraft.model.decoder import Plan
from foredraft.model.runner import Runner
from foredraft.tune.calibration import (
    calibration_prompt_count,
    hold_out,
    new_tokens_per_prompt,
    write_calibration_texts,
)
from foredraft.tune.options import SAMPLERS, Options
from foredraft.tune.ranking import clasp, greedy, skips_of
from foredraft.tune.records import Report
from foredraft.tune.run import tune
from foredraft.tune.teacher_forced import TeacherForced

SPREAD = 0.5  # of the logarithms of --scaled's factors


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def teacher_again(model: str | None, prompts: list[str], options: Options) -> TeacherForced:
    """What the search had: its texts are a function of model, prompts and temperature."""
    llm = foredraft.load(
        model or demo.target_path(),
        drafter="none",
        needs=lambda tokenizer, _: (
            8,
            max(len(tokenizer.encode(prompt)) for prompt in prompts)
            + new_tokens_per_prompt(options.tokens, calibration_prompt_count(len(prompts))),
        ),
    )
    kept, _ = hold_out(llm.encode(prompts))
    calibration = write_calibration_texts(llm, kept, options.tokens, options.temperature, silent)
    runner = llm.engine.target
    assert isinstance(runner, Runner)
    return TeacherForced(runner, calibration, options.max_draft)


def predicted(
    report: Report, teacher: TeacherForced, kinds: dict[str, list[Skips]]
) -> dict[str, list[float]]:
    """Of each kind's plans, by the objective of the search. Those that the search has tried are not tried
    again, for the texts are the same."""
    taus = {Skips.parse(trial.skips).plan(report.layers): np.array(trial.taus) for trial in report.trials}
    untried = list({skips.plan(report.layers) for skips in chain(*kinds.values())} - taus.keys())
    if untried:
        taus |= {plan: found.taus for plan, found in zip(untried, teacher.rounds_of(untried), strict=True)}
    return {
        kind: [float(report.costs.speedups(skips, taus[skips.plan(report.layers)]).max()) for skips in plans]
        for kind, plans in kinds.items()
    }


def left_out(report: Report) -> frozenset[int]:
    """The best plan's sub-layers, numbered as `ranking` does."""
    plan = Skips.parse(report.best.skips).plan(report.layers)
    order = [runs for pair in zip(plan.attention, plan.mlp, strict=True) for runs in pair]
    return frozenset(number for number, runs in enumerate(order) if not runs)


def without_search(report: Report, teacher: TeacherForced, count: int, neighbours: bool) -> dict[str, Any]:
    """The best of each kind, by the objective of the search."""
    everything = 2 * report.layers
    ranked, programmed = greedy(teacher), clasp(teacher, everything - 1)
    best = left_out(report)
    size = len(best)
    draw = random.Random(0)
    kinds: dict[str, list[Skips]] = {
        "greedy": [skips_of(ranked[:count]) for count in range(everything)],
        "clasp": [skips_of(chosen) for chosen in programmed],
        "random of its size": [skips_of(draw.sample(range(everything), size)) for _ in range(count)],
    }
    for flips in (1, 2) if neighbours else ():
        kinds[f"{flips} flipped"] = [
            skips_of(best.symmetric_difference(some)) for some in combinations(range(everything), flips)
        ]
    found: dict[str, Any] = {"search": {"predicted": report.best.predicted, "skips": report.best.skips}}
    for kind, gains in predicted(report, teacher, kinds).items():
        at = int(np.argmax(gains)) if gains else None
        found[kind] = at is not None and {
            "predicted": gains[at],
            "skips": str(kinds[kind][at]),
            "plans": len(gains),
        }
    return found


def scaled(seed: int, out: Path) -> str:
    """The demo target with what each sub-layer adds scaled by a log-normal factor, in a folder."""
    copytree(demo.target_path(), out)
    random = torch.Generator().manual_seed(seed)
    [file] = out.glob("*.safetensors")
    weights = load_file(file)
    for name in sorted(weights):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            factor = torch.exp(SPREAD * torch.randn((), generator=random))
            weights[name] = (weights[name].float() * factor).to(weights[name].dtype)
    save_file(weights, file, {"format": "pt"})
    return str(out)


@torch.inference_mode()
def bare(teacher: TeacherForced) -> None:
    """The forward that a trial is held against: all columns, all sub-layers, norm and head, nothing else."""
    plan = Plan.full(teacher.runner.decoder.spec.layers)
    for blocks in teacher.passes(
        teacher.blocks([row % teacher.max_draft for row in range(len(teacher.texts))])
    ):
        tokens, starts = teacher.inputs(blocks)
        counts = [count for _, _, count in blocks]
        forward = teacher.runner.forward(
            teacher.cache, tokens, starts, first_row=blocks[0][0], idle=[not count for count in counts],
            counts=counts, plan=plan, exact=False, want_logits=False,
        )  # fmt: skip
        for hidden in forward.hidden:
            teacher.runner.head(hidden[None])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a folder; without it, the demo target")
    parser.add_argument("--prompts", help="a file, as of `foredraft tune`")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--random", type=int, default=1000, help="random plans of the best one's size")
    parser.add_argument("--neighbours", action="store_true", help="also all plans one or two flips away")
    parser.add_argument("--scaled", type=int, metavar="SEED", help="the demo target, its sub-layers scaled")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-draft", type=int, default=8)
    parser.add_argument("--sampler", choices=SAMPLERS, default=Options().sampler)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="tune_demo")
    given = parser.parse_args(arguments)
    options = Options(
        trials=given.trials, tokens=given.tokens, temperature=given.temperature, max_draft=given.max_draft,
        sampler=given.sampler, repeats=given.repeats,
    )  # fmt: skip
    prompts = prompts_of(given.prompts, given.model)
    with tempfile.TemporaryDirectory() as folder:  # a study of its own
        os.environ["FOREDRAFT_CACHE"] = folder
        model = given.model if given.scaled is None else scaled(given.scaled, Path(folder) / "scaled")
        seconds, report = timed(lambda: tune(prompts, options, model=model), torch.device("cpu"))
        teacher = teacher_again(model, prompts, options)
    assert teacher.tokens == report.tokens
    full = Plan.full(report.layers)
    device = torch.device("cpu")
    trials, forwards = [], []
    for _ in range(given.repeats):
        forwards.append(timed(lambda: bare(teacher), device)[0])
        trials.append(timed(lambda: teacher.rounds(full), device)[0])
    best = Skips.parse(report.best.skips).plan(report.layers)
    own = [timed(lambda: teacher.rounds(best), device)[0] for _ in range(given.repeats)]
    result: dict[str, Any] = {
        "what": vars(given),
        "machine": machine(),
        "seconds": {"all": seconds, **report.seconds},
        "trials": len(report.trials),
        "tokens": report.tokens,
        "costs": asdict(report.costs),
        "trial": {
            "forward_seconds": spread(forwards),
            "nothing_left_out_over_forward": median(trials) / median(forwards),
            "best_plan_over_forward": median(own) / median(forwards),
            "search_over_forwards": report.seconds["search"] / len(report.trials) / median(forwards),
        },
        "plans": without_search(report, teacher, given.random, given.neighbours),
        "finalists": [
            asdict(one) | {"predicted_over_decoded_tau": one.predicted_tau / one.tau}
            for one in report.finalists
        ],
        "winner": report.winner,
    }
    write(given.name, result)


if __name__ == "__main__":
    main()
