"""Databases of studies: opened if they are empty or hold studies, refused with one line otherwise.

A refused database is left unchanged. No message shows a password. `database_error` finds a database's own
message however deep Optuna has wrapped it. Only `storage`, `study`, `search` and `hill_climbing` import
Optuna.

Raises:
    ConfigError: optuna is not installed; raised on import.
"""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from foredraft.bench.optional import module
from foredraft.errors import ConfigError

__all__ = [
    "GRACE_SECONDS",
    "database_error",
    "heartbeat",
    "hide_password",
    "open_storage",
    "optuna",
    "sqlalchemy",
]

optuna = module("optuna", "the search")
sqlalchemy = module("sqlalchemy", "the search")
models = module("optuna.storages._rdb.models", "the search")
heartbeat = module("optuna.storages._heartbeat", "the search")

HEARTBEAT_SECONDS = 20  # between two heartbeats of a running trial
GRACE_SECONDS = 120  # without a heartbeat after which a trial counts as dead: six missed heartbeats
MAX_ATTEMPTS = 5  # to open a database while another process creates its tables; 1 s in total
VERSION_TABLE = "version_info"  # a table that only Optuna's databases have
REVISION_TABLE = "alembic_version"  # Optuna creates it later, and databases of many programs have one
URL_REMEDY = "give sqlite:///FILE, or the URL of a PostgreSQL or MySQL database: postgresql://USER@HOST/NAME"

optuna.logging.get_logger("optuna").setLevel(logging.ERROR)  # hides a warning for every abandoned trial
RDBStorage: Any = optuna.storages.RDBStorage


class Storage(RDBStorage):  # type: ignore[misc]
    """Optuna's relational storage, with an atomic start of trials and heartbeats that never raise."""

    def set_trial_state_values(
        self, trial_id: int, state: Any, values: Sequence[float] | None = None
    ) -> bool:
        """Start or finish a trial; return False if another process started it first.

        Optuna reads that a trial waits, and then writes that it runs, under a lock that SQLite does not
        have: two processes can start the same trial. Here one statement does both.
        """
        if state != optuna.trial.TrialState.RUNNING:
            return bool(super().set_trial_state_values(trial_id, state, values))
        table = models.TrialModel
        start = (
            sqlalchemy.update(table)
            .where(table.trial_id == trial_id, table.state == optuna.trial.TrialState.WAITING)
            .values(state=state, datetime_start=datetime.now())
        )
        with self.engine.begin() as connection:
            return bool(connection.execute(start).rowcount)

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat and ignore errors, which would end the thread with a traceback.

        If the storage is lost, the next request of the search raises the error.
        """
        with suppress(Exception):
            super().record_heartbeat(trial_id)


def open_storage(url: str) -> Any:
    """Open a database of studies.

    Raises:
        ConfigError: The URL names no database that can hold studies.
    """
    shown, parsed = hide_password(url), _parse_url(url)
    if _in_memory(parsed):
        raise _refused(shown, "which is in memory, where threads cannot share it", "give sqlite:///FILE")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return _open(url, parsed)
        except ConfigError:
            raise
        except sqlalchemy.exc.NoSuchModuleError as error:
            raise _refused(shown, "which is of no kind that can hold studies", URL_REMEDY) from error
        except ImportError as error:
            remedy = "run `pip install 'foredraft[postgres]'`, or install the driver of another database"
            raise _refused(shown, "whose driver is not installed", remedy) from error
        except Exception as error:  # drivers raise exceptions of their own types
            conflict = "already exists" in str(error) or isinstance(error, sqlalchemy.exc.IntegrityError)
            if attempt == MAX_ATTEMPTS or not conflict:
                reason = _mask(parsed.password, database_error(error) or _one_line(error))
                remedy = "give sqlite:///FILE in an existing folder, or the URL of a running database"
                raise _refused(shown, f"which cannot be used ({reason})", remedy) from error
            time.sleep(attempt / 10)
    raise AssertionError


def database_error(error: BaseException | None) -> str | None:
    """Return the database's message among an exception and its causes, or None if no database failed."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.SQLAlchemyError):
            return _one_line(getattr(error, "orig", None) or error)
        if isinstance(error, KeyError) and models.NOT_FOUND_MSG in error.args:
            return "the study is no longer in it"
        error = error.__cause__ or error.__context__
    return None


def hide_password(url: str) -> str:
    """Return a URL with its password masked; in a malformed URL, everything that may be one is masked."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
        shown = str(parsed.render_as_string(hide_password=True)) if parsed.password else url
    except (sqlalchemy.exc.ArgumentError, ValueError):
        scheme, rest = re.fullmatch(r"(?s)(\w[\w+.-]*:/*|)(.*)", url).groups()  # type: ignore[union-attr]
        _, at, place = rest.rpartition("@")
        shown = scheme + (f"***@{place}" if at else re.sub(r"(?s):.*", ":***", rest))
    return re.sub(r"(?i)(pass\w*=)[^&;\s]*", r"\1***", shown)


def _refused(shown: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, option="storage", value=shown, remedy=remedy)


def _parse_url(url: str) -> Any:
    try:
        return sqlalchemy.engine.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:  # its message holds the password
        raise _refused(hide_password(url), "which is not a URL", URL_REMEDY) from error


def _in_memory(url: Any) -> bool:
    if url.get_backend_name() != "sqlite":
        return False
    return not url.database or ":memory:" in url.database or url.query.get("mode") == "memory"


def _open(url: str, parsed: Any) -> Any:
    sqlite = parsed.get_backend_name() == "sqlite"
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if sqlite else {}  # seconds
    engine = sqlalchemy.create_engine(parsed, **options)
    try:
        _check_owner(engine, hide_password(url), is_file=sqlite)
    finally:
        engine.dispose()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = Storage(
            url.replace("{", "{{").replace("}", "}}"),  # Optuna formats the URL as a template
            engine_kwargs=options,
            heartbeat_interval=HEARTBEAT_SECONDS,
            grace_period=GRACE_SECONDS,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )
    try:
        with storage.engine.begin() as connection:  # fails now if the database is read-only
            connection.execute(sqlalchemy.text("UPDATE studies SET study_name = study_name WHERE 1 = 0"))
    except Exception:
        storage.engine.dispose()
        raise
    return storage


def _check_owner(engine: Any, shown: str, is_file: bool) -> None:
    """Refuse a database of another program before Optuna creates its tables there.

    A file may hold nothing but studies. A database on a server may have other tables beside Optuna's,
    unless their names collide.
    """
    known = models.BaseModel.metadata.tables
    inspector = sqlalchemy.inspect(engine)

    def is_optunas(table: str) -> bool:
        if table not in known:
            return False
        columns = {column["name"] for column in inspector.get_columns(table)}
        return columns == set(known[table].columns.keys())

    tables = inspector.get_table_names()
    if VERSION_TABLE in tables and is_optunas(VERSION_TABLE):
        return
    # All tables may still be Optuna's: another process is creating them, or died while it did.
    others = [table for table in tables if not is_optunas(table)]
    if not is_file:
        others = [table for table in others if table in known or table == REVISION_TABLE]
    if others:
        problem = f"which belongs to another program (it has a table {others[0]!r}) and is left unchanged"
        raise _refused(shown, problem, "give an empty database, or a file that does not exist yet")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _mask(password: Any, message: str) -> str:
    return message.replace(str(password), "***") if password else message
