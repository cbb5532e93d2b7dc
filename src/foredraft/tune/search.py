"""The search: Optuna proposes plans, and each trial scores one on the calibration texts.

The objective, the predicted speed-up at the best draft length, has no noise; there is one Boolean parameter
per sub-layer. Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) decodes and times each plan; here a trial
is one forward of the draft (`teacher_forced`).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from foredraft.drafters.skips import Skips
from foredraft.errors import ConfigError, Option
from foredraft.model.spec import Plan
from foredraft.tune.samplers import (
    SeedsFirst,
    clasp,
    count_sub_layer_runs,
    every_other,
    greedy,
    make_sampler,
    skips_of,
)
from foredraft.tune.study import StudyStorage, optuna, run_trial
from foredraft.tune.teacher_forced import Floats, TeacherForced
from foredraft.tune.tune_records import PlanCosts, Trial
from foredraft.tune.tune_settings import Progress, Steps, TuneSettings, silent

SEED_SIZES = 8  # ranked seed plans skip 1/8, 2/8, ..., 7/8 of all sub-layers
KINDS = ("attention", "mlp")
# Names of user attributes. Studies of earlier versions have them, so they never change.
ORIGIN, SEEDS, COSTS = "warm start", "begin with", "costs"


class OutOfTime(Exception):
    """The deadline passed during a trial; the trial is abandoned."""


class Deadline:
    """A moment some seconds after `start`; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at: float | None = None  # seconds of the monotonic clock

    def start(self) -> None:
        if self.seconds is not None:
            self._at = time.monotonic() + self.seconds

    @property
    def passed(self) -> bool:
        return self._at is not None and time.monotonic() >= self._at

    def clip(self, seconds: float) -> float:
        """Return `seconds`, or the seconds left until the deadline if they are fewer."""
        return seconds if self._at is None else max(0.0, min(seconds, self._at - time.monotonic()))

    def check(self) -> None:
        """Raise OutOfTime if the deadline has passed."""
        if self.passed:
            raise OutOfTime


def seed_plans(teacher_forced: TeacherForced, progress: Progress = silent) -> dict[str, Skips]:
    """Return different plans that a search tries first, by name; early exits come last."""
    layers = teacher_forced.runner.decoder.spec.layers
    plans = {"nothing": Skips()}
    if layers > 1:
        plans["every other layer"] = every_other(layers)
    most = 2 * layers - 1
    steps = Steps(progress, "rank", count_sub_layer_runs(layers, most))
    ranked, programmed = greedy(teacher_forced, steps), clasp(teacher_forced, most, steps)
    for eighth in range(1, SEED_SIZES):
        size = min(round(2 * layers * eighth / SEED_SIZES), most)  # at least one sub-layer runs
        for kind, sub_layers in (("greedy", ranked[:size]), ("clasp", programmed[size])):
            if (skips := skips_of(sub_layers)) not in plans.values():
                plans[f"{kind} {size}"] = skips
    return plans | {f"exit {layer}": Skips(exit=layer) for layer in range(1, layers)}


class Search:
    """The part of one process in a study, of which all trials use the same costs."""

    def __init__(
        self,
        storage: StudyStorage,  # the storage of the study
        name: str,  # name of the study
        options: TuneSettings,  # TuneSettings of the search
        teacher_forced: TeacherForced,  # scores plans
        measure_costs: Callable[[], PlanCosts],  # measures what plans cost on this machine
        deadline: Deadline,  # ends the trials
    ) -> None:
        self.options, self.teacher_forced, self.deadline = options, teacher_forced, deadline
        self.layers = teacher_forced.runner.decoder.spec.layers
        self.storage, self.study = storage, storage.open_study(name)
        self.costs = self._shared_costs(measure_costs)
        self._taus = {self._plan(trial.skips): trial.taus for trial in self.trials()}
        self._seeds: dict[Plan, str] = {}  # the names of the seed plans

    def trials(self) -> list[Trial]:
        """Return the completed trials of the study, by number."""
        complete = (optuna.trial.TrialState.COMPLETE,)
        return [
            Trial(
                number=trial.number,
                skips=trial.user_attrs["skips"],
                predicted=trial.value,
                draft=trial.user_attrs["draft"],
                taus=tuple(trial.user_attrs["taus"]),
                origin=trial.user_attrs.get(ORIGIN),
            )
            for trial in self.study.get_trials(deepcopy=False, states=complete)
        ]

    @property
    def plan_count(self) -> int:
        """Number of plans that a model of this size has."""
        return int(2 ** (2 * self.layers))

    @property
    def exhausted(self) -> bool:
        """Whether all plans were tried."""
        if self.plan_count > len(self.study.get_trials(deepcopy=False)):
            return False  # the common case, without a comparison of plans
        return len({self._plan(trial.skips) for trial in self.trials()}) == self.plan_count

    def find_seed_plans(self, progress: Progress = silent) -> None:
        """Find the plans that the trials begin with: those of the study, or ranked now and kept there."""
        stored = self.study.user_attrs.get(SEEDS)
        if stored is None:
            plans = seed_plans(self.teacher_forced, progress)
            stored = json.dumps({origin: str(skips) for origin, skips in plans.items()})
            self.study.set_user_attr(SEEDS, stored)
        self._seeds = {self._plan(skips): origin for origin, skips in json.loads(stored).items()}

    def run_trials(self, progress: Progress) -> None:
        """Run trials until the study has enough, all plans were tried, or the deadline has passed."""
        self.deadline.start()
        trials, total = self.trials(), self.options.trials
        done, best = len(trials), max((trial.predicted for trial in trials), default=0.0)
        started, earlier = time.monotonic(), done

        def report() -> None:
            note = f"best predicted speed-up {best:.2f}" if done else ""
            if earlier < done < total:
                left = (time.monotonic() - started) / (done - earlier) * (total - done)
                note += f", about {_format_duration(self.deadline.clip(left))} left"
            progress("trials", min(done, total), total, note)

        report()
        # A resumed search must not repeat the proposals of the first run, so the seed depends on its trials.
        sampler = make_sampler(self.options.sampler, self.options.seed + len(self.study.trials))
        seeds = [self._params(plan) for plan in self._seeds]
        self.study.sampler = SeedsFirst([*self._params(Plan.full(self.layers))], seeds, sampler)
        while not (len(self.trials()) >= total or self.exhausted or self.deadline.passed):
            predicted = run_trial(self.study, self._objective, ignored=OutOfTime)
            if predicted is not None:
                done += 1
                best = max(best, predicted)
                report()
        if not self.trials():
            raise ConfigError(
                "but no trial was completed in that time",
                option="timeout",
                value=self.options.timeout,
                remedy=("raise ", Option("timeout"), " or lower ", Option("tokens")),
            )
        if self.exhausted and done < total:
            progress("trials", done, done, f"all {self.plan_count} plans were tried")

    def importance(self) -> dict[str, float]:
        """Return the importance of each sub-layer, by "attention.3" or "mlp.3"; the sum is 1."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                warnings.filterwarnings("error", "The number of trials is too small", UserWarning)
                found = optuna.importance.get_param_importances(
                    self.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
                )
        except (ValueError, RuntimeError, UserWarning):  # too few trials, or all alike
            return {}
        return {name: float(share) for name, share in found.items() if np.isfinite(share)}

    def _shared_costs(self, measure_costs: Callable[[], PlanCosts]) -> PlanCosts:
        """Return the study's costs; measure and store them if the study has none."""
        stored = self.study.user_attrs.get(COSTS)
        if stored is None:
            measured = json.dumps(asdict(measure_costs()))
            stored = self.study.user_attrs.get(COSTS)  # another process may have stored its own meanwhile
            if stored is None:
                stored = measured
                self.study.set_user_attr(COSTS, stored)
        return PlanCosts.from_json(stored)

    def _objective(self, trial: Any) -> float:
        """Return the predicted speed-up of the plan that a trial proposes, and store it with the trial."""
        skipped: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for kind, layers in skipped.items():
            for layer in range(self.layers):
                if trial.suggest_categorical(f"{kind}.{layer}", [False, True]):
                    layers.append(layer)
        skips = Skips(tuple(skipped["attention"]), tuple(skipped["mlp"]))
        plan = skips.plan(self.layers)
        if plan in self._seeds:
            trial.set_user_attr(ORIGIN, self._seeds[plan])
        taus = self._taus.get(plan)
        if taus is None:
            taus = tuple(map(float, self.teacher_forced.rounds(plan).taus))
            self._taus[plan] = taus
        fastest, speedups = self._fastest_form(skips, np.array(taus))
        draft = int(speedups.argmax())
        for name, value in (("skips", str(fastest)), ("taus", list(taus)), ("draft", draft + 1)):
            trial.set_user_attr(name, value)
        return float(speedups[draft])

    def _fastest_form(self, skips: Skips, taus: Floats) -> tuple[Skips, Floats]:
        """Return the plan or its equivalent early exit, whichever is faster, and its speed-ups [K]."""
        exit = skips.as_exit(self.layers)
        forms = [skips] if exit is None or self.costs.exit is None else [skips, exit]
        rated = [(form, self.costs.speedups(form, taus)) for form in forms]
        return max(rated, key=lambda pair: pair[1].max())

    def _plan(self, skips: str) -> Plan:
        return Skips.parse(skips).plan(self.layers)

    def _params(self, plan: Plan) -> dict[str, bool]:
        """Return the parameters of a plan in the study: whether each sub-layer is skipped."""
        return {
            f"{kind}.{layer}": not runs for kind in KINDS for layer, runs in enumerate(getattr(plan, kind))
        }


def best_trials(trials: Sequence[Trial], count: int, *, of_copy: bool = False) -> list[Trial]:
    """Return the trials of the `count` best different plans, the best first.

    A plan that leaves nothing out is the target as its own drafter, which can only lose, except as a copy in
    few bits.
    """
    by_plan: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: (-trial.predicted, trial.number)):
        if of_copy or Skips.parse(trial.skips) != Skips():
            by_plan.setdefault(trial.skips, trial)
    return list(by_plan.values())[:count]


def _format_duration(seconds: float) -> str:
    """Return a rounded duration in the largest unit of which there are at least two: "90 s", "6 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
