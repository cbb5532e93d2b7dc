"""Studies: the stored trials of a search, so that it can be interrupted, resumed, and shared by processes.

A finished trial is in the storage before the next one starts. A trial whose process died is marked as
failed once its heartbeats have stopped for `GRACE_SECONDS`, or if its first one never came, and is tried
once more.
"""

from __future__ import annotations

import logging
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigError
from foredraft.tune.hill_climbing import HillClimbingSampler
from foredraft.tune.options import SamplerName
from foredraft.tune.plan_output import check_writable
from foredraft.tune.storage import (
    GRACE_SECONDS,
    database_error,
    heartbeat,
    hide_password,
    open_storage,
    optuna,
    sqlalchemy,
)
from foredraft.user_cache import NotPrivateError, cache_folder, check_file, make_folder

__all__ = ["StudyStorage", "make_sampler", "optuna"]

FIRST_HEARTBEAT_SECONDS = 1.0  # a live trial has recorded its first heartbeat within this time
SQLITE = "sqlite:///"
SQLITE_PARTS = ("", "-wal", "-shm")  # endings of the files of a database with a write-ahead log

logger = logging.getLogger(__name__)


class StudyStorage:
    """The storage of studies.

    Args:
        url: URL of a database. None: a file in the user's cache folder, or memory if there is no cache
            folder.

    Attributes:
        shown: The URL without its password, or "memory".

    Raises:
        ConfigError: The storage cannot be opened; nothing was written then.
    """

    def __init__(self, url: str | None) -> None:
        cached = _cached_database() if url is None else None
        if cached is not None:
            url = f"{SQLITE}{cached}"
        self.shown = "memory" if url is None else hide_password(url)
        self.storage: Any = optuna.storages.InMemoryStorage() if url is None else open_storage(url)
        if cached is not None:
            _relax_durability(self.storage)

    def open_study(self, name: str) -> Any:
        """Return the study of this name; create it if there is none."""
        return optuna.create_study(
            study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
        )

    @contextmanager
    def loss_reported(self) -> Iterator[None]:
        """Raise ConfigError if the database fails while the context is open."""
        try:
            yield
        except Exception as error:
            reason = database_error(error)
            if reason is None:
                raise
            raise ConfigError(
                f"which was lost during the search ({reason}), so no plan was written",
                option="storage",
                value=self.shown,
                remedy="restore it and run the same command again to continue, or start over with another",
            ) from error

    def run_trial(
        self, study: Any, objective: Callable[[Any], float], ignored: type[Exception]
    ) -> float | None:
        """Run one trial and return its value.

        Returns None if the objective raised `ignored`, or if another process marked the trial as failed: a
        machine that was suspended has recorded no heartbeats.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed", UserWarning)
            optuna.storages.fail_stale_trials(study)
            self.fail_trials_without_heartbeat(study)
            trial = study.ask()
        already_finished = optuna.exceptions.UpdateFinishedTrialError
        value = finished = None
        try:
            with (
                heartbeat.get_heartbeat_thread(trial._trial_id, self.storage),
                suppress(ignored, already_finished),
            ):
                value = objective(trial)
        finally:
            state = optuna.trial.TrialState.FAIL if value is None else None
            with suppress(already_finished):
                finished = study.tell(trial, value, state, skip_if_finished=True)
        return None if finished is None else finished.value

    def fail_trials_without_heartbeat(self, study: Any) -> None:
        """Mark trials as failed that died before their first heartbeat, and enqueue them again.

        Optuna does so for trials whose heartbeats stopped, but takes trials without any for running ones.
        """
        dead = self._trials_without_heartbeat(study)
        if not dead:
            return
        # Another machine's clock may be hours behind, so that its trial only seems old: look again.
        time.sleep(FIRST_HEARTBEAT_SECONDS)
        for number in dead & self._trials_without_heartbeat(study):
            try:
                trial = study.tell(number, state=optuna.trial.TrialState.FAIL)
            except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
                continue  # another process did it
            self.storage.get_heartbeat_stale_trial_callback()(study, trial)

    def _trials_without_heartbeat(self, study: Any) -> set[int]:
        """Return the numbers of running trials that started long ago and have recorded no heartbeat."""
        if not isinstance(self.storage, optuna.storages.RDBStorage):
            return set()
        running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
        latest = datetime.now() - timedelta(seconds=GRACE_SECONDS)
        old = {trial._trial_id: trial.number for trial in running if trial.datetime_start < latest}
        if not old:
            return set()
        query = sqlalchemy.text("SELECT trial_id FROM trial_heartbeats WHERE trial_id IN :old")
        with self.storage.engine.connect() as connection:
            rows = connection.execute(
                query.bindparams(sqlalchemy.bindparam("old", list(old), expanding=True))
            )
            return set(old.values()) - {old[id] for (id,) in rows}


def make_sampler(name: SamplerName, seed: int) -> Any:
    """Return an Optuna sampler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "tpe":
                return optuna.samplers.TPESampler(seed=seed)
            case "gp":
                return optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)
            case "hill-climbing":
                return HillClimbingSampler(seed)
            case "random":
                return optuna.samplers.RandomSampler(seed=seed)


def _cached_database() -> Path | None:
    """Return the database file in the user's cache folder, or None if there is no cache folder."""
    folder = cache_folder("studies")
    if folder is None:
        return None
    check_writable(folder)
    make_folder(folder)
    database = folder / "studies.db"
    if database.exists() and (reason := _unusable_because(database)) is not None:
        logger.warning("the cached studies are set aside as %s.broken, because %s", database, reason)
        for part in SQLITE_PARTS:  # a new database must not meet the journal of the old one
            with suppress(FileNotFoundError):
                Path(f"{database}{part}").replace(f"{database}.broken{part}")
    return database


def _unusable_because(database: Path) -> str | None:
    """Return why a database file of the cache cannot be used, as a clause; None where it can be.

    A database that is only locked can be used.
    """
    try:
        check_file(database)
        with closing(sqlite3.connect(database)) as connection:
            [found, *_] = connection.execute("PRAGMA quick_check(1)").fetchone()
        return None if found == "ok" else f"it is damaged ({found})"
    except NotPrivateError as error:
        return f"the file {error.strerror}"
    except sqlite3.OperationalError:
        return None
    except sqlite3.DatabaseError as error:
        return f"it is damaged ({error})"


def _relax_durability(storage: Any) -> None:
    """Let the operating system delay commits, which halves the time of a trial's 40 commits.

    A killed process still loses nothing. Files that a user names may lie on a network disk, where this is
    unsafe.
    """

    def prepare(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(storage.engine, "connect", prepare)
    storage.engine.dispose()
