"""The search: Optuna proposes plans, first the seed plans and then a sampler's, and each trial scores one.

The objective, the predicted speed-up at the best draft length, has no noise; there is one Boolean parameter
per sub-layer. Draft & Verify (Zhang et al. 2023, arXiv:2309.08168) decodes and times each plan; here a trial
is one forward of the draft (`teacher_forced`). Seed plans:

- skip every second layer.
- `greedy`: rank sub-layers by how little skipping each one alone changes the states before the head.
- `clasp`: the dynamic programme of CLaSp (Chen et al. 2025, arXiv:2505.24196) over columns of a few drafts:

      D(i, j) = max(cos(h_i, g(i-1, j-1)),  cos(h_i, f_i(g(i-1, j))))

where j of the first i sub-layers are skipped, g(i, j) are the states of the better choice, f_i is the i-th
sub-layer, and h_i is the target's state there. It runs once, with the mean cosine over all columns.

Sub-layers are numbered as they run: 2i is the attention of layer i, and 2i + 1 its MLP. A plan counts as
tried once a trial of it is complete; a plan whose trial still runs, or died, comes after all others.
"""

from __future__ import annotations

import json
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.bench.settings import Progress, Steps, TuneSettings, silent
from foredraft.drafters.plan_files import Skips
from foredraft.drafters.strict_records import as_record
from foredraft.errors import ConfigError, Option
from foredraft.model.runner import Resume
from foredraft.model.spec import Plan
from foredraft.tune.study import StudyStorage, optuna, run_trial
from foredraft.tune.teacher_forced import TeacherForced
from foredraft.tune.tune_records import PlanCosts, Trial

MAX_COLUMNS = 256  # columns that a ranking compares; bounds its time

OnRun = Callable[[int], None]  # receives the number of sub-layers that the columns went through


def skips_of(sub_layers: Iterable[int]) -> Skips:
    """Convert numbers of sub-layers to skips."""
    chosen = sorted(sub_layers)
    return Skips(tuple(i // 2 for i in chosen if i % 2 == 0), tuple(i // 2 for i in chosen if i % 2))


@torch.inference_mode()
def greedy(teacher_forced: TeacherForced, on_run: OnRun = lambda count: None) -> list[int]:
    """Return the numbers of all sub-layers, ordered by how little skipping each changes the final states."""
    sample = _Sample(teacher_forced)
    layers = sample.layers
    full = sample.run(sample.embedded, 0, layers, Plan.full(layers))
    on_run(2 * layers)
    change = []
    for number in range(2 * layers):
        plan = skips_of([number]).plan(layers)
        change.append(1 - sample.cosine(full, sample.run(sample.embedded, 0, layers, plan)))
        on_run(2 * layers)
    return sorted(range(2 * layers), key=change.__getitem__)


@torch.inference_mode()
def clasp(
    teacher_forced: TeacherForced, max_skipped: int, on_run: OnRun = lambda count: None
) -> list[tuple[int, ...]]:
    """Return CLaSp's choice of sub-layers to skip, for 0, 1, ..., `max_skipped` of them."""
    sample = _Sample(teacher_forced)
    target = sample.embedded  # h_i
    states = [target]  # g(i, j) by j
    skipped: list[tuple[int, ...]] = [()]  # the choices that lead to them
    for number in range(2 * sample.layers):
        target = sample.run_sub_layer(target, number)
        ran = [sample.run_sub_layer(state, number) for state in states]
        next_states: list[Tensor] = []
        next_skipped: list[tuple[int, ...]] = []
        for count in range(min(len(states) + 1, max_skipped + 1)):
            if_run = sample.cosine(target, ran[count]) if count < len(states) else -2.0
            if_skipped = sample.cosine(target, states[count - 1]) if count else -2.0
            skip = if_skipped > if_run
            next_states.append(states[count - 1] if skip else ran[count])
            next_skipped.append((*skipped[count - 1], number) if skip else skipped[count])
        on_run(1 + len(states))
        states, skipped = next_states, next_skipped
    return skipped


class _Sample:
    """One draft of each of the first texts, and forwards of them through a range of layers."""

    def __init__(self, teacher_forced: TeacherForced) -> None:
        self.runner, self.cache = teacher_forced.drafting, teacher_forced.cache
        self.layers = self.runner.decoder.spec.layers
        rows = max(1, min(len(teacher_forced.texts), MAX_COLUMNS // teacher_forced.max_draft))
        of_each_text = teacher_forced.blocks([0] * len(teacher_forced.texts))[:rows]
        # away from both ends of the text, or where its states are
        places = (0 if teacher_forced.recurs else len(drafts) // 2 for drafts in of_each_text)
        blocks = [drafts[place] for place, drafts in zip(places, of_each_text, strict=True)]
        self.tokens, self.starts = teacher_forced.inputs(blocks)
        self.counts = [block.columns for block in blocks]
        width = self.tokens.shape[1]
        device = self.tokens.device
        self.real = torch.arange(width, device=device) < torch.tensor(self.counts, device=device)[:, None]
        positions = torch.tensor(self.starts, device=device)[:, None] + torch.arange(width, device=device)
        self.embedded = self.runner.decoder.embed(self.tokens, positions)  # [B, T, D]
        teacher_forced.restore()

    def run(self, hidden: Tensor, start: int, stop: int, plan: Plan) -> Tensor:
        """Run layers `start` to `stop` - 1 on states [B, T, D]."""
        known = [self.tokens.shape[1]] * len(self.starts)
        return self.runner.forward(
            self.cache, self.tokens, self.starts, counts=self.counts, plan=plan, stop=stop,
            resume=Resume(start, hidden, known), want_logits=False, invariant=False,
        ).hidden  # fmt: skip

    def run_sub_layer(self, hidden: Tensor, number: int) -> Tensor:
        """Run one sub-layer on states [B, T, D]."""
        layer, is_mlp = divmod(number, 2)
        only = tuple(index == layer for index in range(self.layers))
        none = (False,) * self.layers
        return self.run(hidden, layer, layer + 1, Plan(none, only) if is_mlp else Plan(only, none))

    def cosine(self, a: Tensor, b: Tensor) -> float:
        """Return the mean cosine similarity over all columns."""
        return float(F.cosine_similarity(a[self.real].float(), b[self.real].float(), dim=-1).mean())


MAX_LISTED = 20_000  # sets of flips (all pairs of 200 sub-layers); beyond it, the sampler takes random sets
RANDOM_SETS = 64  # random sets of flips to choose from; among so many sets, few were tried before

P = TypeVar("P")
BaseSampler: Any = optuna.samplers.BaseSampler
State: Any = optuna.trial.TrialState


class SeedsFirst(BaseSampler):  # type: ignore[misc]
    """Proposes the seed plans in their order, and then what another sampler proposes."""

    def __init__(self, names: Sequence[str], seeds: Sequence[dict[str, bool]], then: Any) -> None:
        boolean = optuna.distributions.CategoricalDistribution([False, True])
        self._space = dict.fromkeys(names, boolean)
        self._seeds, self._then = seeds, then

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        complete, running = ([one.params for one in _trials(study, state)] for state in _TRIED)
        seeds = _untried(self._seeds, complete, running)
        if seeds:
            return seeds[0]
        found: dict[str, Any] = self._then.sample_relative(study, trial, search_space)
        return found

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._then.sample_independent(study, trial, name, distribution)


class HillClimbingSampler(BaseSampler):  # type: ignore[misc]
    """Proposes an untried plan at the smallest distance, in flips of sub-layers, from the best one so far."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._first = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        space: dict[str, Any] = optuna.search_space.intersection_search_space(_trials(study, State.COMPLETE))
        return space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        if not search_space or not _trials(study, State.COMPLETE):
            return {}
        names, best = list(search_space), study.best_trial.params
        complete, running = (
            {
                frozenset(name for name in names if other.params[name] != best[name])
                for other in _trials(study, state)
                if search_space.keys() <= other.params.keys()
            }
            for state in _TRIED
        )
        for distance in range(1, len(names) + 1):
            flips: Iterator[frozenset[str]] = map(frozenset, combinations(names, distance))
            if math.comb(len(names), distance) > MAX_LISTED:  # a random part of all sets of so many names
                flips = (frozenset(self._random.sample(names, distance)) for _ in range(RANDOM_SETS))
            if untried := _untried(list(flips), complete, running):
                flipped = self._random.choice(untried)
                return {name: best[name] != (name in flipped) for name in names}
        return {}  # every plan was tried

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._first.sample_independent(study, trial, name, distribution)


_TRIED = (State.COMPLETE, State.RUNNING)


def _trials(study: Any, state: Any) -> list[Any]:
    found: list[Any] = study.get_trials(deepcopy=False, states=(state,))
    return found


def _untried(plans: Sequence[P], complete: Any, running: Any) -> list[P]:
    """Return the plans that are not complete; those that run are left out too, unless only they are left."""
    left = [plan for plan in plans if plan not in complete]
    return [plan for plan in left if plan not in running] or left


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
        self._at = math.inf  # seconds of the monotonic clock

    def start(self) -> None:
        self._at = math.inf if self.seconds is None else time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """The seconds that are left, 0 at least."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0

    def check(self) -> None:
        """Raise OutOfTime if the deadline has passed."""
        if self.passed:
            raise OutOfTime


def seed_plans(teacher_forced: TeacherForced, progress: Progress = silent) -> dict[str, Skips]:
    """Return different plans that a search tries first, by name; early exits come last."""
    layers = teacher_forced.runner.decoder.spec.layers
    plans = {"nothing": Skips()}
    if odd := tuple(range(1, layers, 2)):
        plans["every other layer"] = Skips(odd, odd)
    most = 2 * layers - 1
    # sub-layers that `greedy` and `clasp` together run
    runs = 2 * layers * (1 + 2 * layers) + sum(1 + min(number + 1, most + 1) for number in range(2 * layers))
    steps = Steps(progress, "rank", runs)
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
        if COSTS not in self.study.user_attrs:
            measured = json.dumps(asdict(measure_costs()))
            if COSTS not in self.study.user_attrs:  # another process may have stored its own meanwhile
                self.study.set_user_attr(COSTS, measured)
        self.costs = as_record(PlanCosts, json.loads(self.study.user_attrs[COSTS]))
        self._taus = {self._plan(trial.skips): trial.taus for trial in self.trials()}
        self._seeds: dict[Plan, str] = {}  # the names of the seed plans

    def trials(self) -> list[Trial]:
        """Return the completed trials of the study, by number."""
        return [
            Trial(
                number=trial.number,
                skips=trial.user_attrs["skips"],
                predicted=trial.value,
                draft=trial.user_attrs["draft"],
                taus=tuple(trial.user_attrs["taus"]),
                origin=trial.user_attrs.get(ORIGIN),
            )
            for trial in _trials(self.study, State.COMPLETE)
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
        if SEEDS not in self.study.user_attrs:
            plans = seed_plans(self.teacher_forced, progress)
            stored = json.dumps({origin: str(skips) for origin, skips in plans.items()})
            self.study.set_user_attr(SEEDS, stored)
        seeds = json.loads(self.study.user_attrs[SEEDS])
        self._seeds = {self._plan(skips): origin for origin, skips in seeds.items()}

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
                left = min(left, self.deadline.left)  # in the largest unit of which there are at least two
                units = ((name, size) for name, size in (("h", 3600), ("min", 60)) if left >= 2 * size)
                unit, size = next(units, ("s", 1))
                note += f", about {left / size:.0f} {unit} left"
            progress("trials", min(done, total), total, note)

        report()
        # A resumed search must not repeat the proposals of the first run, so the seed depends on its trials.
        seed = self.options.seed + len(self.study.trials)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.options.sampler == "hill-climbing":
                sampler: Any = HillClimbingSampler(seed)
            else:
                sampler = optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
        seeds = [self._params(plan) for plan in self._seeds]
        self.study.sampler = SeedsFirst([*self._params(Plan.full(self.layers))], seeds, sampler)
        while not (len(self.trials()) >= total or self.exhausted or self.deadline.passed):
            predicted = run_trial(self.study, self._objective, ignored=OutOfTime)
            if predicted is not None:
                done += 1
                best = max(best, predicted)
                report()
        if not self.trials():
            problem = "but no trial was completed in that time"
            remedy = ("raise ", Option("timeout"), " or lower ", Option("tokens"))
            raise ConfigError(problem, option="timeout", value=self.options.timeout, remedy=remedy)
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

    def _objective(self, trial: Any) -> float:
        """Return the predicted speed-up of the plan that a trial proposes, and store it with the trial."""
        attention, mlp = (
            tuple(i for i in range(self.layers) if trial.suggest_categorical(f"{kind}.{i}", [False, True]))
            for kind in KINDS
        )
        skips = Skips(attention, mlp)
        plan = skips.plan(self.layers)
        if plan in self._seeds:
            trial.set_user_attr(ORIGIN, self._seeds[plan])
        if plan not in self._taus:
            self._taus[plan] = tuple(map(float, self.teacher_forced.rounds(plan).taus))
        taus = self._taus[plan]
        # the plan or its equivalent early exit, whichever is faster, and its speed-ups [K]
        exit = skips.as_exit(self.layers)
        forms = [skips] if exit is None or self.costs.exit is None else [skips, exit]
        rated = [(form, self.costs.speedups(form, np.array(taus))) for form in forms]
        fastest, speedups = max(rated, key=lambda pair: pair[1].max())
        draft = int(speedups.argmax())
        for name, value in (("skips", str(fastest)), ("taus", list(taus)), ("draft", draft + 1)):
            trial.set_user_attr(name, value)
        return float(speedups[draft])

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
