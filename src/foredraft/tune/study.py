"""Studies: where trials are kept, so that a search can be broken off, gone on with, and shared.

Contract: a finished trial is in the storage before the next one begins. A trial whose process died is given
up once its heartbeats have stopped for a while, or the first one never came, and tried once more.
"""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.tune.hill_climbing import FlipSampler
from foredraft.tune.options import SamplerName
from foredraft.tune.plan_output import check_kept
from foredraft.tune.storage import GRACE, failure, heartbeat, hidden, open_storage, optuna, sqlalchemy
from foredraft.user_cache import cache_folder

__all__ = ["StudyPlace", "make_sampler", "optuna"]

FIRST = 1.0  # seconds in which a trial that lives has given its first sign
SQLITE = "sqlite:///"


class StudyPlace:
    """A storage that could be opened.

    url: of a database; None: a file in the user's cache folder, or this process's memory where nothing is
    kept. Raises ConfigError where it cannot be opened; nothing was written then.
    """

    def __init__(self, url: str | None) -> None:
        own = _own_file() if url is None else None
        if own is not None:
            url = f"{SQLITE}{own}"
        self.shown = "memory" if url is None else hidden(url)
        self.storage: Any = optuna.storages.InMemoryStorage() if url is None else open_storage(url)
        if own is not None:
            _quicken(self.storage)

    def study(self, name: str) -> Any:
        """The study of this name, begun or gone on with."""
        return optuna.create_study(
            study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While entered, that the storage is lost is a ConfigError that says what is kept, and what to do."""
        try:
            yield
        except Exception as error:
            reason = failure(error)
            if reason is None:
                raise
            raise ConfigError(
                f"storage is {self.shown!r}, which was lost during the search ({reason}); no plan was"
                " written, and the trials that ended are kept nowhere else: bring it back, and the same"
                " command goes on with them, or begin anew with another"
            ) from error

    def trial(self, study: Any, objective: Callable[[Any], float], ignored: type[Exception]) -> float | None:
        """Begin a trial and end it. Its value; None where the objective raised `ignored`, or another process
        had given it up: a machine that slept for a while has given no sign of life."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed", UserWarning)
            optuna.storages.fail_stale_trials(study)
            self.give_up_unborn(study)
            trial = study.ask()
        taken = optuna.exceptions.UpdateFinishedTrialError
        value = ended = None
        try:
            with (
                heartbeat.get_heartbeat_thread(trial._trial_id, self.storage),
                suppress(ignored, taken),
            ):
                value = objective(trial)
        finally:
            state = optuna.trial.TrialState.FAIL if value is None else None
            with suppress(taken):
                ended = study.tell(trial, value, state, skip_if_finished=True)
        return None if ended is None else ended.value

    def give_up_unborn(self, study: Any) -> None:
        """Give up trials that died before their first heartbeat, as Optuna does those that died later: it
        looks for old heartbeats, and would take these for running ones for ever."""
        dead = self._unborn(study)
        if not dead:
            return
        time.sleep(FIRST)  # another machine's clock may be hours behind ours, and its trial a moment old
        for number in dead & self._unborn(study):
            try:
                trial = study.tell(number, state=optuna.trial.TrialState.FAIL)
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                continue  # another process gave it up
            self.storage.get_heartbeat_stale_trial_callback()(study, trial)

    def _unborn(self, study: Any) -> set[int]:
        """Numbers of the trials that run, began long ago, and have given no sign of life."""
        if not isinstance(self.storage, optuna.storages.RDBStorage):
            return set()
        running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        began = datetime.now() - timedelta(seconds=GRACE)
        old = {trial._trial_id: trial.number for trial in running if trial.datetime_start < began}
        if not old:
            return set()
        beats = sqlalchemy.text("SELECT trial_id FROM trial_heartbeats WHERE trial_id IN :old")
        with self.storage.engine.connect() as connection:
            found = connection.execute(
                beats.bindparams(sqlalchemy.bindparam("old", list(old), expanding=True))
            )
            return set(old.values()) - {old[id] for (id,) in found}


def make_sampler(name: SamplerName, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
            case "flips":
                return FlipSampler(seed)
            case "random":
                return optuna.samplers.RandomSampler(seed=seed)


def _own_file() -> Path | None:
    folder = cache_folder("studies")
    if folder is None:
        return None
    check_kept(folder)
    folder.mkdir(exist_ok=True)
    return folder / "studies.db"


def _quicken(storage: Any) -> None:
    """Leave it to the system when commits reach the disk: a killed process still loses none, and a trial's
    forty commits take half the time. Not for files of the user's, which may lie on a network's disk."""

    def prepare(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(storage.engine, "connect", prepare)
    storage.engine.dispose()
