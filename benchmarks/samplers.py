"""Which sampler is worth its time: TPE, Gaussian process, hill climbing or random, at 32 to 160 switches.

Two objectives. A synthetic one: each sub-layer that a draft leaves out lowers the chance of its tokens by a
factor of its own, two neighbours by one more, and saves its cost; what is sought is the predicted speed-up.
And the demo target's own, by the search's trials (--demo). Nobody is told where to begin, unless --warm:
then searches begin with ranked plans, the synthetic ones by what each sub-layer loses when it is left out
alone. For each sampler and seed: the best speed-up after so many trials, and the seconds a trial that the
sampler took. A result is added to those that the file of results holds, so that they may come in pieces.

    python benchmarks/samplers.py --switches 32,64,160 --trials 200 --gp-trials 60 --seeds 3 --demo

A Gaussian process takes longer with each trial and switch, so it may have fewer trials.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from timing import spread, timed
from tune_demo import silent, teacher_again
from workload import HERE, machine, write

from foredraft.cli.tune import prompts_of
from foredraft.model.decoder import Plan
from foredraft.tune.costs import PlanCosts
from foredraft.tune.expected_rounds import ExpectedRounds
from foredraft.tune.options import SAMPLERS, Options
from foredraft.tune.ranking import skips_of
from foredraft.tune.search import SEED_SIZES, Deadline, Search, seed_plans
from foredraft.tune.study import StudyStorage

DEVICE = torch.device("cpu")
LONGEST = 8
MARKS = (25, 50, 60, 100, 200, 400)  # trials after which the best is told


class Shape:
    """Stands for the runner of a model: its decoder's spec has so many layers, and nothing else."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.decoder = self.spec = self


class Synthetic:
    """Losses are log-normal: most sub-layers matter little, a few very much."""

    def __init__(self, layers: int) -> None:
        self.runner, self.layers = Shape(layers), layers
        random = np.random.default_rng(layers)
        self.alone = np.exp(random.normal(-5.5 - np.log(layers / 16), 1.5, 2 * layers))
        self.together = np.exp(random.normal(-6.5 - np.log(layers / 16), 1.5, 2 * layers))

    def rounds(self, plan: Plan) -> ExpectedRounds:
        left_out = ~np.array([runs for pair in zip(plan.attention, plan.mlp, strict=True) for runs in pair])
        loss = (self.alone * left_out).sum() + (self.together * (left_out & np.roll(left_out, 1))).sum()
        return ExpectedRounds.from_acceptance(
            np.full((1, 4 * LONGEST, LONGEST), np.exp(-loss)), np.array([4 * LONGEST])
        )

    def warm_starts(self) -> dict[str, str]:
        ranked = [int(number) for number in self.alone.argsort()]
        sizes = [round(len(ranked) * eighth / SEED_SIZES) for eighth in range(SEED_SIZES)]
        return {f"greedy {size}": str(skips_of(ranked[:size])) for size in sizes}

    @property
    def costs(self) -> PlanCosts:
        share = 0.94 / self.layers
        verifying = tuple(1 + 0.02 * rows for rows in range(1, LONGEST + 1))
        return PlanCosts(1.0, 0.06, (0.4 * share,) * self.layers, 0.6 * share, verifying)


class Demo:
    """The demo target's trials; the same plan is computed once for all samplers."""

    def __init__(self, tokens: int) -> None:
        self.teacher = teacher_again(None, prompts_of(None, None), Options(tokens=tokens, max_draft=LONGEST))
        self.runner = self.teacher.runner
        self.seen: dict[Plan, ExpectedRounds] = {}

    def rounds(self, plan: Plan) -> ExpectedRounds:
        if plan not in self.seen:
            self.seen[plan] = self.teacher.rounds(plan)
        return self.seen[plan]

    def warm_starts(self) -> dict[str, str]:
        return {origin: str(skips) for origin, skips in seed_plans(self.teacher).items()}

    costs = PlanCosts(
        1.0, 0.06, (0.031,) * 16, 0.026, tuple(1 + 0.02 * rows for rows in range(1, LONGEST + 1))
    )


def run(objective: Any, sampler: str, trials: int, seed: int, plans: dict[str, str]) -> dict[str, Any]:
    clock = 0.0
    rounds = objective.rounds

    def watched(plan: Plan) -> ExpectedRounds:
        nonlocal clock
        seconds, found = timed(lambda: rounds(plan), DEVICE)
        clock += seconds
        return found

    class Watched:
        runner = objective.runner
        rounds = staticmethod(watched)

    options = Options(trials=trials, sampler=sampler, seed=seed)
    name = f"{id(objective)} {sampler} {seed}"
    search = Search(StudyStorage(None), name, options, Watched(), lambda: objective.costs, Deadline(None))
    search.study.set_user_attr("begin with", json.dumps(plans))
    search.enqueue_seed_plans()
    seconds, _ = timed(lambda: search.run_trials(silent), DEVICE)
    best = list(accumulate((trial.predicted for trial in search.trials()), max))
    return {
        "best": {mark: best[mark - 1] for mark in MARKS if mark <= trials},
        "own": (seconds - clock) / trials,
    }


def compared(objective: Any, given: argparse.Namespace) -> dict[str, Any]:
    """By sampler: over the seeds."""
    found: dict[str, Any] = {}
    plans = objective.warm_starts() if given.warm else {}
    for sampler in given.samplers.split(","):
        trials = given.gp_trials if sampler == "gp" else given.trials
        runs = [run(objective, sampler, trials, seed, plans) for seed in range(given.seeds)]
        found[sampler] = {
            "best": {mark: spread([one["best"][mark] for one in runs]) for mark in runs[0]["best"]},
            "seconds_a_trial": spread([one["own"] for one in runs]),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--switches", default="32,64,96,160", help="2 L of the synthetic models")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--gp-trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demo", action="store_true", help="also by the demo target's own trials")
    parser.add_argument("--tokens", type=int, default=1024, help="of the demo's trials")
    parser.add_argument(
        "--warm", action="store_true", help="searches begin with ranked plans, as those of tune do"
    )
    parser.add_argument("--name", default="samplers")
    given = parser.parse_args(arguments)
    os.environ["FOREDRAFT_CACHE"] = ""  # studies in memory
    result: dict[str, Any] = {"what": vars(given), "machine": machine(), "synthetic": {}}
    for switches in map(int, filter(None, given.switches.split(","))):
        result["synthetic"][switches] = compared(Synthetic(switches // 2), given)
    if given.demo:
        result["demo"] = compared(Demo(given.tokens), given)
    kept = HERE / "results" / f"{given.name}.json"
    earlier = json.loads(kept.read_text())["pieces"] if kept.exists() else []
    write(given.name, {"pieces": [*earlier, result]})


if __name__ == "__main__":
    main()
