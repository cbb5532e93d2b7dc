"""Searches whose trials take no time, and child processes that a test can kill during a search."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from foredraft.bench.settings import TuneSettings, silent
from foredraft.drafters.plan_files import Skips
from foredraft.tune import search
from foredraft.tune.search import Deadline, Search
from foredraft.tune.study import StudyStorage, optuna
from foredraft.tune.teacher_forced import ExpectedRounds
from foredraft.tune.tune_records import PlanCosts
from tests.support.running import forked

LAYERS = 4
COSTS = PlanCosts(1e-3, 0.05, (0.1,) * LAYERS, 0.13, (1.0, 1.02, 1.04))


class FakeTeacherForced:
    """Each skipped sub-layer lowers the acceptance probability by a factor; those of layer 0 matter most."""

    runner = SimpleNamespace(decoder=SimpleNamespace(spec=SimpleNamespace(layers=LAYERS)))

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.trials = seconds, 0

    def rounds(self, plan: Any) -> ExpectedRounds:
        self.trials += 1
        time.sleep(self.seconds)
        acceptance = 0.97
        for layer, (attention, mlp) in enumerate(zip(plan.attention, plan.mlp, strict=True)):
            acceptance *= 1.0 if attention else (0.3 if layer == 0 else 0.96)
            acceptance *= 1.0 if mlp else (0.3 if layer == 0 else 0.9)
        return ExpectedRounds.from_acceptance(np.full((1, 60, 3), acceptance), np.array([60]))


SEED_PLANS = {"nothing": Skips(), "every other layer": Skips((1, 3), (1, 3))}


def make_search(
    url: str | None, teacher_forced: Any, costs: PlanCosts = COSTS, options: TuneSettings | None = None
) -> Search:
    settings = options or TuneSettings()
    return Search(StudyStorage(url), "a study", settings, teacher_forced, lambda: costs, Deadline(None))


def run_search(
    url: str | None, teacher_forced: Any = None, costs: PlanCosts = COSTS, **options: Any
) -> Search:
    given = TuneSettings(**{"trials": 12, **options})
    search = make_search(url, teacher_forced or FakeTeacherForced(), costs, given)
    search.find_seed_plans()
    search.run_trials(silent)
    return search


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


KILL_POINTS = {
    "within a trial": (FakeTeacherForced, "rounds"),
    "while the trial is stored": (optuna.storages.RDBStorage, "set_trial_state_values"),
}


def kill_at(kill_point: str, call: int) -> None:
    owner, name = KILL_POINTS[kill_point]
    method, calls = getattr(owner, name), iter(range(1, call + 1))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    setattr(owner, name, deadly)


def run_child(url: str, seconds: float = 0.0, trials: int = 1000, seed: int = 0, kill_point: str = "") -> int:
    """Run a search in a process of its own, whose trials take this many seconds, and return its exit code."""
    return forked(_run_child, url, str(seconds), str(trials), str(seed), kill_point).returncode


def _run_child(arguments: list[str]) -> None:
    url, seconds, trials, seed, kill_point = arguments
    search.seed_plans = lambda *_: dict(SEED_PLANS)
    if kill_point:
        kill_at(kill_point, 4)
    run_search(url, FakeTeacherForced(float(seconds)), trials=int(trials), seed=int(seed))


@contextmanager
def open_database(url: str) -> Iterator[Any]:
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


def stored_trials(url: str, state: str = "COMPLETE") -> dict[int, float | None]:
    with open_database(url) as storage:
        trials = optuna.load_study(study_name="a study", storage=storage).trials
    return {trial.number: trial.value for trial in trials if trial.state.name == state}
