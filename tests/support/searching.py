"""Searches whose trials take no time: what the tests of studies share, and the processes that they kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy

from foredraft.drafters.skips import Skips
from foredraft.tune.costs import PlanCosts
from foredraft.tune.expected_rounds import Rounds
from foredraft.tune.options import Options
from foredraft.tune.search import Deadline, Search
from foredraft.tune.study import StudyPlace, optuna
from tests.support.running import ROOT

LAYERS = 4
COSTS = PlanCosts(1e-3, 0.05, (0.1,) * LAYERS, 0.13, (1.0, 1.02, 1.04))


class FakeTeacher:
    """Each sub-layer that is left out costs its share of the drafts' chances; layer 0's cost most."""

    class runner:
        class decoder:
            class spec:
                layers = LAYERS

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.trials = seconds, 0

    def rounds(self, plan: Any) -> Rounds:
        self.trials += 1
        time.sleep(self.seconds)
        chance = 0.97
        for layer in range(LAYERS):
            chance *= 1.0 if plan.attention[layer] else (0.3 if layer == 0 else 0.96)
            chance *= 1.0 if plan.mlp[layer] else (0.3 if layer == 0 else 0.9)
        return Rounds.of(np.full((1, 60, 3), chance), np.array([60]))


WARM = {"nothing": Skips(), "every other layer": Skips((1, 3), (1, 3))}


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    return None


def searched(url: str | None, teacher: Any = None, costs: PlanCosts = COSTS, **options: Any) -> Search:
    """A search that has ended."""
    made = Search(
        StudyPlace(url),
        "a study",
        Options(**{"trials": 12, "sampler": "random", **options}),
        teacher or FakeTeacher(),
        lambda: costs,
        Deadline(None),
    )
    made.begin()
    made.run(silent)
    return made


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


CHILD = f"""
import sys
sys.path.insert(0, "{ROOT}/tests")
from tests.support import searching
from foredraft.tune import search
search.warm_starts = lambda *_: dict(searching.WARM)
url, seconds, trials, seed, moment = sys.argv[1:]
if moment:
    searching.dies_at(moment, 4)
searching.searched(url, searching.FakeTeacher(float(seconds)), trials=int(trials), seed=int(seed))
"""
MOMENTS = {
    "within a trial": (FakeTeacher, "rounds"),
    "before its first heartbeat": (optuna.storages.RDBStorage, "record_heartbeat"),
    "as it is kept": (optuna.storages.RDBStorage, "set_trial_state_values"),
    "between two": (StudyPlace, "give_up_unborn"),
}


def dies_at(moment: str, call: int) -> None:
    """This process is killed as it enters the method for the n-th time."""
    owner, name = MOMENTS[moment]
    method, calls = getattr(owner, name), iter(range(1, call + 1))

    def deadly(*given: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*given, **options)

    setattr(owner, name, deadly)


def child(
    url: str, seconds: float = 0.0, trials: int = 1000, seed: int = 0, moment: str = ""
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [url, str(seconds), str(trials), str(seed), moment]
    return subprocess.Popen([sys.executable, "-c", CHILD, *words], env=env)


@contextmanager
def opened(url: str) -> Iterator[Any]:
    storage = optuna.storages.RDBStorage(url)
    try:
        yield storage
    finally:
        storage.engine.dispose()


def kept(url: str, state: str = "COMPLETE") -> dict[int, float | None]:
    """Values of a study's trials in that state, by number."""
    with opened(url) as storage:
        trials = optuna.load_study(study_name="a study", storage=storage).trials
    return {trial.number: trial.value for trial in trials if trial.state.name == state}


def days_later(url: str) -> None:
    """For the trials that run, whatever the time zones."""
    running = "(SELECT trial_id FROM trials WHERE state = 'RUNNING')"
    with opened(url) as storage, storage.engine.begin() as connection:
        for table, column in (("trials", "datetime_start"), ("trial_heartbeats", "heartbeat")):
            change = f"UPDATE {table} SET {column} = :then WHERE trial_id IN {running}"
            then = datetime.now() - timedelta(days=2)
            connection.execute(sqlalchemy.text(change), {"then": then})
