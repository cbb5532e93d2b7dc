"""The search: trials of plans, proposed by Optuna, each held against the same texts.

The objective is the predicted speed-up at its best draft length; it has no noise. A switch a sub-layer
(Draft & Verify, Zhang et al. 2023, arXiv:2309.08168, searched boxes by decoding and timing each); here a
trial is one forward of the draft (`teacher`).
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
from foredraft.errors import ConfigError
from foredraft.model.decoder import Plan
from foredraft.tune.costs import PlanCosts
from foredraft.tune.expected_rounds import Floats
from foredraft.tune.options import Options
from foredraft.tune.progress import Progress, Steps, silent
from foredraft.tune.ranking import clasp, every_other, greedy, skips_of, sub_layers_run
from foredraft.tune.records import Trial
from foredraft.tune.study import StudyPlace, make_sampler, optuna
from foredraft.tune.teacher_forced import TeacherForced

__all__ = ["Deadline", "OutOfTime", "Search", "best_of", "warm_starts"]

SIZES = 8  # of ranked plans that a search begins with
WARM = "warm start"


class OutOfTime(Exception):
    """A trial that the deadline fell into; it is given up."""


class Deadline:
    """So many seconds after `begin`; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._at: float | None = None  # on the monotonic clock

    def begin(self) -> None:
        if self.seconds is not None:
            self._at = time.monotonic() + self.seconds

    @property
    def passed(self) -> bool:
        return self._at is not None and time.monotonic() >= self._at

    def within(self, seconds: float) -> float:
        """So many, or what is left until then."""
        return seconds if self._at is None else max(0.0, min(seconds, self._at - time.monotonic()))

    def check(self) -> None:
        """Raises OutOfTime once it has passed."""
        if self.passed:
            raise OutOfTime


def warm_starts(teacher: TeacherForced, progress: Progress = silent) -> dict[str, Skips]:
    """Different plans to begin with, by what they are; early exits come last."""
    layers = teacher.runner.decoder.spec.layers
    found = {"nothing": Skips()}
    if layers > 1:
        found["every other layer"] = every_other(layers)
    steps = Steps(progress, "rank", sub_layers_run(layers, 2 * layers - 1))
    ranked, programmed = greedy(teacher, steps), clasp(teacher, 2 * layers - 1, steps)
    for eighth in range(1, SIZES):
        size = min(round(2 * layers * eighth / SIZES), 2 * layers - 1)  # of few, one runs
        for kind, sub_layers in (("greedy", ranked[:size]), ("clasp", programmed[size])):
            if (skips := skips_of(sub_layers)) not in found.values():
                found[f"{kind} {size}"] = skips
    return found | {f"exit {layer}": Skips(exit=layer) for layer in range(1, layers)}


class Search:
    """One process's part in a study. measure: the costs, asked for where the study has none yet: all trials
    of a study are held against the same ones."""

    def __init__(
        self,
        place: StudyPlace,
        name: str,
        options: Options,
        teacher: TeacherForced,
        measure: Callable[[], PlanCosts],
        deadline: Deadline,
    ) -> None:
        self.options, self.teacher, self.deadline = options, teacher, deadline
        self.layers = teacher.runner.decoder.spec.layers
        self.place, self.study = place, place.study(name)
        told = self.study.user_attrs.get("costs")
        if told is None:
            measured = json.dumps(asdict(measure()))
            told = self.study.user_attrs.get("costs")  # another process may have been faster
            if told is None:
                told = measured
                self.study.set_user_attr("costs", told)
        self.costs = PlanCosts.told(told)
        self._taus = {self._plan(trial.skips): trial.taus for trial in self.trials()}

    def trials(self) -> list[Trial]:
        """Those that ended, in their order."""
        complete = (optuna.trial.TrialState.COMPLETE,)
        found = self.study.get_trials(deepcopy=False, states=complete)
        return [
            Trial(
                number=trial.number,
                skips=trial.user_attrs["skips"],
                predicted=trial.value,
                draft=trial.user_attrs["draft"],
                taus=tuple(trial.user_attrs["taus"]),
                origin=trial.user_attrs.get(WARM),
            )
            for trial in found
        ]

    def run(self, progress: Progress) -> None:
        """Trials until the study has enough, all plans were tried, or time is up. Raises ConfigError where
        none ended."""
        self.deadline.begin()
        done = len(self.trials())
        best = max((trial.predicted for trial in self.trials()), default=0.0)
        total = self.options.trials
        began, before = time.monotonic(), done

        def tell() -> None:
            note = f"best predicted speed-up {best:.2f}" if done else ""
            if before < done < total:
                left = (time.monotonic() - began) / (done - before) * (total - done)
                note += f", about {_spelled(self.deadline.within(left))} left"
            progress("trials", min(done, total), total, note)

        tell()
        # whoever goes on must not propose again what was proposed at the beginning
        self.study.sampler = make_sampler(self.options.sampler, self.options.seed + len(self.study.trials))
        while not (len(self.trials()) >= total or self.exhausted or self.deadline.passed):
            predicted = self.place.trial(self.study, self._predicted, ignored=OutOfTime)
            if predicted is not None:
                done += 1
                best = max(best, predicted)
                tell()
        if not self.trials():
            raise ConfigError(
                f"timeout is {self.options.timeout:g}, in which not one trial ended; give more seconds, or"
                " fewer tokens"
            )
        if self.exhausted and done < total:
            progress("trials", done, done, f"all {self.plans} plans were tried")

    @property
    def plans(self) -> int:
        """How many there are."""
        return int(2 ** (2 * self.layers))

    @property
    def exhausted(self) -> bool:
        """Whether all were tried, so that more trials would only repeat them."""
        if self.plans > len(self.study.get_trials(deepcopy=False)):
            return False  # which is seen sooner
        return len({self._plan(trial.skips) for trial in self.trials()}) == self.plans

    def begin(self, progress: Progress = silent) -> None:
        """Have the plans of `warm_starts` tried before what the sampler proposes, unless they were."""
        self.place.give_up_unborn(self.study)
        told = self.study.user_attrs.get("begin with")
        if told is None:
            plans = {origin: str(skips) for origin, skips in warm_starts(self.teacher, progress).items()}
            told = json.dumps(plans)
            self.study.set_user_attr("begin with", told)
        state = optuna.trial.TrialState
        open_ = self.study.get_trials(deepcopy=False, states=(state.WAITING, state.RUNNING))
        begun = {trial.user_attrs.get(WARM) for trial in open_}
        for origin, spelled in json.loads(told).items():
            plan = self._plan(spelled)
            if plan not in self._taus and origin not in begun:
                params = {
                    f"{kind}.{layer}": not runs
                    for kind in ("attention", "mlp")
                    for layer, runs in enumerate(getattr(plan, kind))
                }
                self.study.enqueue_trial(params, user_attrs={WARM: origin})

    def importance(self) -> dict[str, float]:
        """Of each sub-layer's switch for the predicted speed-up, by its name; they sum to 1. Empty where the
        trials tell nothing."""
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

    def _predicted(self, trial: Any) -> float:
        left_out: dict[str, list[int]] = {"attention": [], "mlp": []}
        for kind, layers in left_out.items():
            for layer in range(self.layers):
                if trial.suggest_categorical(f"{kind}.{layer}", [False, True]):
                    layers.append(layer)
        skips = Skips(tuple(left_out["attention"]), tuple(left_out["mlp"]))
        plan = skips.plan(self.layers)
        taus = self._taus.get(plan)
        if taus is None:
            taus = tuple(map(float, self.teacher.rounds(plan).taus))
            self._taus[plan] = taus
        best, speedups = self._faster(skips, np.array(taus))
        draft = int(speedups.argmax())
        for name, value in (("skips", str(best)), ("taus", list(taus)), ("draft", draft + 1)):
            trial.set_user_attr(name, value)
        return float(speedups[draft])

    def _faster(self, skips: Skips, taus: Floats) -> tuple[Skips, Floats]:
        """The faster way to run a plan, which may be an early exit, and its speed-ups [K]."""
        exit = skips.as_exit(self.layers)
        ways = [skips] if exit is None or self.costs.exit is None else [skips, exit]
        rated = [(way, self.costs.speedups(way, taus)) for way in ways]
        return max(rated, key=lambda each: each[1].max())

    def _plan(self, spelled: str) -> Plan:
        return Skips.spelled(spelled).plan(self.layers)


def best_of(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best different plans, the best first."""
    found: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: (-trial.predicted, trial.number)):
        found.setdefault(trial.skips, trial)
    return list(found.values())[:count]


def _spelled(seconds: float) -> str:
    """Roughly, in the largest unit of which there are two."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
