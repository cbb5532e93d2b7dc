"""Studies: where trials are kept, so that a search can be broken off, gone on with, and shared.

Contract: a finished trial is in the storage before the next one begins. A trial whose process died is given
up once its heartbeats have stopped for a while, or the first one never came, and tried once more. Only here,
in `search` and in `flips` is Optuna known.

Raises ConfigError, when it is imported, where optuna is not installed.
"""

from __future__ import annotations

import logging
import sqlite3
import time
import warnings
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from foredraft.bench.optional import module
from foredraft.errors import ConfigError
from foredraft.kernels.machine import cache_folder
from foredraft.tune.flips import FlipSampler
from foredraft.tune.options import SamplerName

__all__ = ["StudyPlace", "make_sampler", "optuna"]

optuna = module("optuna", "the search")
sqlalchemy = module("sqlalchemy", "the search")

HEARTBEAT, GRACE = 20, 120  # seconds: between two signs of life, and until there have been none for too long
TRIES = 5  # to open a database whose tables another process is making
FIRST = 1.0  # seconds in which a trial that lives has given its first sign
SQLITE = "sqlite:///"

optuna.logging.get_logger("optuna").setLevel(logging.ERROR)  # a trial that is given up is no news


class StudyPlace:
    """A storage that could be opened.

    url: an Optuna URL; None: a file in the user's cache folder, or this process's memory where nothing is
    kept. Raises ConfigError where it cannot be opened; nothing was written then.
    """

    def __init__(self, url: str | None) -> None:
        own = _own_file() if url is None else None
        self.shown = "memory" if url is None and own is None else _without_password(url or f"{SQLITE}{own}")
        self.storage: Any = optuna.storages.InMemoryStorage()
        if url is not None or own is not None:
            self.storage = _opened(url or f"{SQLITE}{own}", self.shown)
            if own is not None:
                _quicken(self.storage)

    def study(self, name: str) -> Any:
        """The study of this name, begun or gone on with."""
        try:
            return optuna.create_study(
                study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
            )
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise _unusable(self.shown, error) from error

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
    folder = cache_folder()
    if folder is None:
        return None
    try:
        (folder / "studies").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no study can be kept in {folder} ({error.strerror}); give storage='sqlite:///FILE'"
        ) from error
    return folder / "studies" / "studies.db"


def _opened(url: str, shown: str) -> Any:
    for tried in range(1, TRIES + 1):
        try:
            return _storage(url)
        except ImportError as error:
            raise ConfigError(
                f"storage is {shown!r}, whose driver is not installed; run `pip install"
                " 'foredraft[postgres]'`, or what another database needs"
            ) from error
        except (sqlalchemy.exc.SQLAlchemyError, OSError, RuntimeError, ValueError) as error:
            if tried == TRIES or "already exists" not in str(error):
                raise _unusable(shown, error) from error
            time.sleep(tried / 10)
    raise AssertionError


def _storage(url: str) -> Any:
    storages = optuna.storages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return storages.RDBStorage(
            url,
            engine_kwargs={"connect_args": {"timeout": 60}} if url.startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )


def _quicken(storage: Any) -> None:
    """Leave it to the system when commits reach the disk: a killed process still loses none, and a trial's
    forty commits take half the time. Not for files of the user's, which may lie on a network's disk."""

    def prepare(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    sqlalchemy.event.listen(storage.engine, "connect", prepare)
    storage.engine.dispose()


def _unusable(shown: str, error: Exception) -> ConfigError:
    told = getattr(error, "orig", None) or error
    reason = " ".join(str(told).split())[:200]
    return ConfigError(
        f"storage is {shown!r}, which cannot be used ({reason}); give sqlite:///FILE in a folder that there"
        " is, or the URL of a database that runs"
    )


def _without_password(url: str) -> str:
    try:
        return str(sqlalchemy.engine.make_url(url).render_as_string(hide_password=True))
    except sqlalchemy.exc.ArgumentError as error:
        raise ConfigError(f"storage is {url!r}, which is no URL; give one like sqlite:///FILE") from error
