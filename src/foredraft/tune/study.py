"""Studies: the stored trials of a search, so that it can be interrupted, resumed, and shared by processes.

Optuna stores them, through its public interface alone; only `study` and `search` import it. A plan counts
as tried once its trial is complete, so a process that dies leaves nothing to clear away. A file that holds no
studies is refused and left unchanged. No message shows a password.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from foredraft.bench.contenders import module
from foredraft.errors import ConfigError
from foredraft.tune.finals import check_writable
from foredraft.user_cache import NotPrivateError, cache_folder, check_file, make_folder

optuna = module("optuna", "the search")

SQLITE = "sqlite:///"
SQLITE_PARTS = ("", "-wal", "-shm")  # endings of the files of a database with a write-ahead log
WAIT = 60  # seconds that a process waits while another one writes to the file
MAX_ATTEMPTS = 5  # to open a database while another process creates its tables; 1 s in total
CREATED_BY_ANOTHER = re.compile("already exists|unique constraint", re.IGNORECASE)
URL_REMEDY = "give sqlite:///FILE, or the URL of a database on a server: postgresql://USER@HOST/NAME"

optuna.logging.set_verbosity(optuna.logging.ERROR)  # below it is a line for every trial

logger = logging.getLogger(__name__)


class StudyStorage:
    """The storage of studies."""

    def __init__(self, url: str | None) -> None:
        self._study: str | None = None
        cached = _cached_database() if url is None else None
        if cached is not None:
            url = f"{SQLITE}{cached}"
        self.shown = "memory" if url is None else _shown(url)  # without what may be a password
        in_memory = optuna.storages.InMemoryStorage
        self.storage: Any = in_memory() if url is None else _open(url, in_cache=cached is not None)

    def open_study(self, name: str) -> Any:
        """Return the study of this name; create it if there is none."""
        self._study = name
        return optuna.create_study(
            study_name=name, storage=self.storage, direction="maximize", load_if_exists=True
        )

    @contextmanager
    def loss_reported(self) -> Iterator[None]:
        """Raise ConfigError if the database fails while the context is open, or loses the study."""
        try:
            yield
        except Exception as error:
            if (reason := self._loss(error)) is None:
                raise
            problem = f"which was lost during the search ({reason}), so no plan was written"
            remedy = "restore it and run the same command again to continue, or start over with another"
            raise ConfigError(problem, option="storage", value=self.shown, remedy=remedy) from error

    def _loss(self, error: Exception) -> str | None:
        """Return why an exception means that the study is lost; None if the study is still there."""
        try:
            if isinstance(error, optuna.exceptions.StorageInternalError):
                raise error
            names = optuna.get_all_study_names(self.storage)
        except Exception as lost:
            return _reason(lost)
        return None if self._study in (None, *names) else "the study is no longer in it"


def run_trial(study: Any, objective: Callable[[Any], float], ignored: type[Exception]) -> float | None:
    """Run one trial and return its value; None if the objective raised `ignored`, or it was ended."""
    ended = optuna.exceptions.UpdateFinishedTrialError
    trial, value, finished = study.ask(), None, None
    try:
        with suppress(ignored, ended):
            value = objective(trial)
    finally:
        state = optuna.trial.TrialState.FAIL if value is None else None
        with suppress(ended):
            finished = study.tell(trial, value, state, skip_if_finished=True)
    return None if finished is None else finished.value


class _Relaxed(sqlite3.Connection):
    """A connection whose commits the system may delay: faster by half, unsafe on a network disk."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        for setting in ("journal_mode=WAL", "synchronous=NORMAL"):
            self.execute(f"PRAGMA {setting}")


def _open(url: str, *, in_cache: bool) -> Any:
    """Return Optuna's storage at a URL."""
    options: dict[str, Any] = {}
    if url.startswith("sqlite"):
        _check_file(url)
        connecting = {"timeout": WAIT} | ({"factory": _Relaxed} if in_cache else {})
        options = {"connect_args": connecting}
    elif not re.match(r"\w[\w+.-]*://", url):
        raise _refused(url, "which is not a URL", URL_REMEDY)
    template = url.replace("{", "{{").replace("}", "}}")  # Optuna formats the URL
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return optuna.storages.RDBStorage(template, engine_kwargs=options)
        except ImportError as error:
            remedy = "run `pip install 'foredraft[postgres]'`, or install the driver of another database"
            raise _refused(url, "whose driver is not installed", remedy) from error
        except Exception as error:  # drivers raise exceptions of their own types
            if attempt == MAX_ATTEMPTS or not CREATED_BY_ANOTHER.search(str(error)):
                reason = _reason(error)
                remedy = "give sqlite:///FILE in an existing folder, or the URL of a running database"
                secrets = () if url.startswith("sqlite") else re.findall(r"[:=]([^:/@?&=]+)", url)
                for secret in secrets:  # parts of the URL that may be a password
                    reason = reason.replace(secret, "***")
                raise _refused(url, f"which cannot be used ({reason})", remedy) from error
            time.sleep(attempt / 10)
    raise AssertionError


def _check_file(url: str) -> None:
    """Refuse a file that this process cannot write, and one that holds something else than studies."""
    name = url.removeprefix(SQLITE)
    if name == url or not name or name.startswith((":memory:", "file:")) or "?" in name:
        raise _refused(url, "which names no file", "give sqlite:///FILE")
    if not Path(name).exists():
        return
    try:
        with closing(sqlite3.connect(name, timeout=WAIT)) as file:
            tables = [table for (table,) in file.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            if not tables:
                return
            try:  # Optuna's first table, which lists the studies
                file.execute("SELECT study_id, study_name FROM studies")
            except sqlite3.OperationalError:
                owner = f"another program (it has a table {tables[0]!r})"
                problem = f"which belongs to {owner} and is left unchanged"
                raise _refused(url, problem, "give a file that does not exist yet") from None
            # fails now if the file is read-only
            file.execute("UPDATE studies SET study_name = study_name WHERE 1 = 0")
    except sqlite3.Error as error:
        raise _refused(url, f"which cannot be used ({error})", "give another file") from error


def _refused(url: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, option="storage", value=_shown(url), remedy=remedy)


def _shown(url: str) -> str:
    kind, colon, _ = url.partition(":")
    return f"{kind}:***" if colon and not url.startswith("sqlite") else url


def _reason(error: BaseException) -> str:
    """Return the message of the first of an exception's causes, which is the database's own, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200]


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
    """Return why a database file cannot be used, as a clause; None where it can be, even if locked."""
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
