"""Compare the samplers of the layer-skip search: hill climbing and a Gaussian process.

There are two objectives; both are the predicted speed-up of a plan. In the synthetic one, each skipped
sub-layer lowers the acceptance of drafted tokens by its own factor, two skipped neighbours by one more, and
saves its cost; it has 32 to 160 switches. The other one (--demo) is the demo target's own, by trials of the
search. Searches begin without seed plans, or with --warm from ranked plans; the synthetic ranking is by the
loss of each sub-layer skipped alone. For each sampler and seed, the script reports the best speed-up after
certain numbers of trials, and the sampler's own seconds per trial. Each run appends its result to the result
file, so that the parts of a comparison can run separately.

    python -m benchmarks.samplers --switches 32,64,160 --trials 200 --gp-trials 60 --seeds 3 --demo

A Gaussian process takes longer with every trial and every switch, so it may have fewer trials.
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

from benchmarks.timing import spread, timed
from benchmarks.tune_demo import silent, teacher_again
from benchmarks.workload import HERE, machine, write
from foredraft.cli.tune import prompts_of
from foredraft.model.plan import Plan
from foredraft.tune.expected_rounds import ExpectedRounds
from foredraft.tune.plan_costs import PlanCosts
from foredraft.tune.ranking import skips_of
from foredraft.tune.search import SEED_SIZES, Deadline, Search, seed_plans
from foredraft.tune.study import StudyStorage
from foredraft.tune.tune_settings import SAMPLERS, TuneSettings

DEVICE = torch.device("cpu")
LONGEST = 8  # longest draft, in tokens
MARKS = (25, 50, 60, 100, 200, 400)  # numbers of trials after which the best speed-up is reported


class Shape:
    """A stand-in for a runner, its decoder and its spec: only the number of layers is known."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.decoder = self.spec = self


class Synthetic:
    """The synthetic objective.

    Skipping a sub-layer has a loss (`alone`), and skipping two neighbours has one more (`together`). Losses
    are log-normal: most sub-layers matter little, a few very much.
    """

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
    """The demo target's objective; a plan that several samplers try is computed once."""

    def __init__(self, tokens: int) -> None:
        self.teacher = teacher_again(
            None, prompts_of(None, None), TuneSettings(tokens=tokens, max_draft=LONGEST)
        )
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
    """Run a search; return the best speed-ups by number of trials, and the sampler's seconds per trial."""
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

    options = TuneSettings(trials=trials, sampler=sampler, seed=seed)
    name = f"{id(objective)} {sampler} {seed}"
    search = Search(StudyStorage(None), name, options, Watched(), lambda: objective.costs, Deadline(None))
    search.study.set_user_attr("begin with", json.dumps(plans))
    search.find_seed_plans()
    seconds, _ = timed(lambda: search.run_trials(silent), DEVICE)
    best = list(accumulate((trial.predicted for trial in search.trials()), max))
    return {
        "best": {mark: best[mark - 1] for mark in MARKS if mark <= trials},
        "sampler_seconds": (seconds - clock) / trials,
    }


def compare(objective: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Return the spreads over the seeds, by sampler; the keys are those of the result file."""
    found: dict[str, Any] = {}
    plans = objective.warm_starts() if given.warm else {}
    for sampler in given.samplers.split(","):
        trials = given.gp_trials if sampler == "gp" else given.trials
        runs = [run(objective, sampler, trials, seed, plans) for seed in range(given.seeds)]
        found[sampler] = {
            "best": {mark: spread([each["best"][mark] for each in runs]) for mark in runs[0]["best"]},
            "seconds_a_trial": spread([each["sampler_seconds"] for each in runs]),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--switches", default="32,64,96,160", help="of the synthetic models: 2 per layer; joined by commas"
    )
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--gp-trials", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demo", action="store_true", help="also compare on the demo target")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a trial on the demo target")
    parser.add_argument("--warm", action="store_true", help="begin with ranked plans, as `tune` does")
    parser.add_argument("--name", default="samplers")
    given = parser.parse_args(arguments)
    os.environ["FOREDRAFT_CACHE"] = ""  # keeps the studies in memory
    result: dict[str, Any] = {"what": vars(given), "machine": machine(), "synthetic": {}}
    for switches in map(int, filter(None, given.switches.split(","))):
        result["synthetic"][switches] = compare(Synthetic(switches // 2), given)
    if given.demo:
        result["demo"] = compare(Demo(given.tokens), given)
    kept = HERE / "results" / f"{given.name}.json"
    earlier = json.loads(kept.read_text())["pieces"] if kept.exists() else []
    write(given.name, {"pieces": [*earlier, result]})


if __name__ == "__main__":
    main()
