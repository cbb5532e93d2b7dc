"""The gain and the cost of a layer-skip search: `foredraft tune` compared with plans found without search.

The script does all of the command's work on the demo target or on another model. Then it compares the best
plan, on the same texts and with the same costs, with the plans of the greedy ranking and of the dynamic
programme at all sizes, with random plans of the same size, and with all plans that differ from it in one or
two sub-layers. The result also has the seconds of each stage, the time of a trial over that of a bare forward
over the same columns with all sub-layers, predicted and decoded tau, and speed-ups with their exactness flag.

The demo target was grown from four of its layers, which any ranking finds. --scaled makes a different model
from it by scaling the output of each sub-layer with a random factor.

    python -m benchmarks.tune_demo --trials 200 --random 1000 --neighbours
    python -m benchmarks.tune_demo --trials 200 --random 1000 --scaled 1 --name tune_scaled
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

from benchmarks.timing import spread, timed
from benchmarks.workload import machine, write
from foredraft import demo
from foredraft.cli.tune import prompts_of
from foredraft.drafters.skips import Skips
from foredraft.loading import load_for
from foredraft.model.plan import Plan
from foredraft.tune.calibration import (
    calibration_prompt_count,
    hold_out,
    new_tokens_per_prompt,
    write_calibration_texts,
)
from foredraft.tune.ranking import clasp, greedy, skips_of
from foredraft.tune.run import tune
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_records import TuneReport
from foredraft.tune.tune_settings import SAMPLERS, TuneSettings

SIGMA = 0.5  # standard deviation of the logarithms of the factors of --scaled


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def teacher_again(model: str | None, prompts: list[str], options: TuneSettings) -> TeacherForced:
    """Rebuild the texts of the search, which depend only on model, prompts and temperature."""
    llm = load_for(
        lambda tokenizer, _: (
            8,
            max(len(tokenizer.encode(prompt)) for prompt in prompts)
            + new_tokens_per_prompt(options.tokens, calibration_prompt_count(len(prompts))),
        ),
        model or demo.target_path(),
        drafter="none",
    )
    kept, _ = hold_out(llm.encode(prompts))
    calibration = write_calibration_texts(llm, kept, options.tokens, options.temperature, silent)
    runner = llm.loaded.runner
    return TeacherForced(runner, calibration, options.max_draft)


def predicted(
    report: TuneReport, teacher: TeacherForced, kinds: dict[str, list[Skips]]
) -> dict[str, list[float]]:
    """Return the predicted speed-ups of each kind's plans, reusing the trials of the search."""
    taus = {Skips.parse(trial.skips).plan(report.layers): np.array(trial.taus) for trial in report.trials}
    untried = list({skips.plan(report.layers) for skips in chain(*kinds.values())} - taus.keys())
    if untried:
        taus |= {plan: found.taus for plan, found in zip(untried, teacher.rounds_of(untried), strict=True)}
    return {
        kind: [float(report.costs.speedups(skips, taus[skips.plan(report.layers)]).max()) for skips in plans]
        for kind, plans in kinds.items()
    }


def skipped(report: TuneReport) -> frozenset[int]:
    """Return the sub-layers that the best plan skips, numbered as in `ranking`."""
    plan = Skips.parse(report.best.skips).plan(report.layers)
    order = [runs for pair in zip(plan.attention, plan.mlp, strict=True) for runs in pair]
    return frozenset(number for number, runs in enumerate(order) if not runs)


def without_search(
    report: TuneReport, teacher: TeacherForced, count: int, neighbours: bool
) -> dict[str, Any]:
    """Return the best plan of each kind found without search, by predicted speed-up.

    Args:
        report: The report of the search.
        teacher: The texts of the search.
        count: Number of random plans.
        neighbours: Also try all plans that differ from the best one in one or two sub-layers.
    """
    sub_layers = 2 * report.layers
    ranked, programmed = greedy(teacher), clasp(teacher, sub_layers - 1)
    best = skipped(report)
    size = len(best)
    generator = random.Random(0)
    kinds: dict[str, list[Skips]] = {
        "greedy": [skips_of(ranked[:count]) for count in range(sub_layers)],
        "clasp": [skips_of(plan) for plan in programmed],
        "random of its size": [skips_of(generator.sample(range(sub_layers), size)) for _ in range(count)],
    }
    for flips in (1, 2) if neighbours else ():
        kinds[f"{flips} flipped"] = [
            skips_of(best.symmetric_difference(flipped)) for flipped in combinations(range(sub_layers), flips)
        ]
    found: dict[str, Any] = {"search": {"predicted": report.best.predicted, "skips": report.best.skips}}
    for kind, speedups in predicted(report, teacher, kinds).items():
        place = int(np.argmax(speedups)) if speedups else None
        found[kind] = place is not None and {
            "predicted": speedups[place],
            "skips": str(kinds[kind][place]),
            "plans": len(speedups),
        }
    return found


def scaled(seed: int, out: Path) -> str:
    """Write the demo target to a folder with each sub-layer's output scaled by a log-normal factor."""
    copytree(demo.target_path(), out)
    random = torch.Generator().manual_seed(seed)
    [file] = out.glob("*.safetensors")
    weights = load_file(file)
    for name in sorted(weights):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            factor = torch.exp(SIGMA * torch.randn((), generator=random))
            weights[name] = (weights[name].float() * factor).to(weights[name].dtype)
    save_file(weights, file, {"format": "pt"})
    return str(out)


@torch.inference_mode()
def bare(teacher: TeacherForced) -> None:
    """Run the bare forward that trials are compared with: all columns, all sub-layers, norm and head."""
    plan = Plan.full(teacher.runner.decoder.spec.layers)
    for blocks in teacher.passes(
        teacher.blocks([row % teacher.max_draft for row in range(len(teacher.texts))])
    ):
        tokens, starts = teacher.inputs(blocks)
        counts = [count for _, _, count in blocks]
        forward = teacher.runner.forward(
            teacher.cache, tokens, starts, first_row=blocks[0][0], idle=[not count for count in counts],
            counts=counts, plan=plan, invariant=False, want_logits=False,
        )  # fmt: skip
        for hidden in forward.hidden:
            teacher.runner.head(hidden[None])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder of the model; by default the demo target")
    parser.add_argument("--prompts", help="a file, as for `foredraft tune`")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument(
        "--random", type=int, default=1000, help="number of random plans of the best plan's size"
    )
    parser.add_argument("--neighbours", action="store_true", help="also try all plans one or two flips away")
    parser.add_argument("--scaled", type=int, metavar="SEED", help="scale the demo target's sub-layers")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-draft", type=int, default=8)
    parser.add_argument("--sampler", choices=SAMPLERS, default=TuneSettings().sampler)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="tune_demo")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    options = TuneSettings(
        trials=given.trials, tokens=given.tokens, temperature=given.temperature, max_draft=given.max_draft,
        sampler=given.sampler, repeats=given.repeats,
    )  # fmt: skip
    prompts = prompts_of(given.prompts, given.model)
    with tempfile.TemporaryDirectory() as folder:  # an empty cache, so that the search starts a new study
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
