"""Searches whose trials take no time, and child processes that a test can kill during a search."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.drafters.skips import Skips
from foredraft.tune.expected_rounds import ExpectedRounds
from foredraft.tune.plan_costs import PlanCosts
from foredraft.tune.search import Deadline, Search
from foredraft.tune.study import StudyStorage, optuna
from foredraft.tune.tune_settings import TuneSettings
from tests.support.running import ROOT, environment

LAYERS = 4
COSTS = PlanCosts(1e-3, 0.05, (0.1,) * LAYERS, 0.13, (1.0, 1.02, 1.04))


class FakeTeacherForced:
    """Each skipped sub-layer lowers the acceptance probability by a factor; those of layer 0 matter most."""

    class runner:
        class decoder:
            class spec:
                layers = LAYERS

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


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def make_search(
    url: str | None, teacher_forced: Any, costs: PlanCosts = COSTS, options: TuneSettings | None = None
) -> Search:
    """A search without a deadline in the study "a study"."""
    storage = StudyStorage(url)
    return Search(
        storage, "a study", options or TuneSettings(), teacher_forced, lambda: costs, Deadline(None)
    )


def run_search(
    url: str | None, teacher_forced: Any = None, costs: PlanCosts = COSTS, **options: Any
) -> Search:
    """A search that has run all its trials."""
    given = TuneSettings(**{"trials": 12, **options})
    search = make_search(url, teacher_forced or FakeTeacherForced(), costs, given)
    search.find_seed_plans()
    search.run_trials(silent)
    return search


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


CHILD = f"""
import sys
sys.path.insert(0, "{ROOT}")
from tests.support import searching
from foredraft.tune import search
search.seed_plans = lambda *_: dict(searching.SEED_PLANS)
url, seconds, trials, seed, kill_point = sys.argv[1:]
if kill_point:
    searching.kill_at(kill_point, 4)
searching.run_search(url, searching.FakeTeacherForced(float(seconds)), trials=int(trials), seed=int(seed))
"""
KILL_POINTS = {
    "within a trial": (FakeTeacherForced, "rounds"),
    "while the trial is stored": (optuna.storages.RDBStorage, "set_trial_state_values"),
}


def kill_at(kill_point: str, call: int) -> None:
    """Kill this process when it calls the method of the kill point for the n-th time."""
    owner, name = KILL_POINTS[kill_point]
    method, calls = getattr(owner, name), iter(range(1, call + 1))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    setattr(owner, name, deadly)


def start_child(
    url: str, seconds: float = 0.0, trials: int = 1000, seed: int = 0, kill_point: str = ""
) -> subprocess.Popen[bytes]:
    """Start a search in a process of its own, whose trials take this many seconds."""
    arguments = [url, str(seconds), str(trials), str(seed), kill_point]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=environment())


@contextmanager
def open_database(url: str) -> Iterator[Any]:
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


def stored_trials(url: str, state: str = "COMPLETE") -> dict[int, float | None]:
    """The values of the study's trials in this state, by number."""
    with open_database(url) as storage:
        trials = optuna.load_study(study_name="a study", storage=storage).trials
    return {trial.number: trial.value for trial in trials if trial.state.name == state}
