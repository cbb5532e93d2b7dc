"""Databases for studies: opened where they are empty or hold studies, refused in one line otherwise.

Contract: a database that is refused stays as it is. No message holds a password. What a database says when
it fails is found however deep Optuna has wrapped it. Only in this room's `storage`, `study`, `search` and
`flips` is Optuna known.

Raises ConfigError, when it is imported, where optuna is not installed.
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

__all__ = ["GRACE", "failure", "heartbeat", "hidden", "open_storage", "optuna", "sqlalchemy"]

optuna = module("optuna", "the search")
sqlalchemy = module("sqlalchemy", "the search")
models = module("optuna.storages._rdb.models", "the search")
heartbeat = module("optuna.storages._heartbeat", "the search")

HEARTBEAT, GRACE = 20, 120  # seconds: between two signs of life, and until there have been none for too long
TRIES = 5  # to open a database whose tables another process is making
OWN = "version_info"  # a table that only a database of Optuna's has
REVISIONS = "alembic_version"  # its own too, but made after the other, and many programs have one
KINDS = "give sqlite:///FILE, or the URL of a PostgreSQL or MySQL database, as postgresql://USER@HOST/NAME"

optuna.logging.get_logger("optuna").setLevel(logging.ERROR)  # a trial that is given up is no news
Database: Any = optuna.storages.RDBStorage


class Storage(Database):  # type: ignore[misc]
    def set_trial_state_values(
        self, trial_id: int, state: Any, values: Sequence[float] | None = None
    ) -> bool:
        """Begin or end a trial; False where another process began it before.

        Optuna reads whether a trial waits and then writes that it runs, under a lock which SQLite does not
        have: two processes can both believe that they began it. Here it is one statement.
        """
        if state != optuna.trial.TrialState.RUNNING:
            return bool(super().set_trial_state_values(trial_id, state, values))
        table = models.TrialModel
        begin = (
            sqlalchemy.update(table)
            .where(table.trial_id == trial_id, table.state == optuna.trial.TrialState.WAITING)
            .values(state=state, datetime_start=datetime.now())
        )
        with self.engine.begin() as connection:
            return bool(connection.execute(begin).rowcount)

    def record_heartbeat(self, trial_id: int) -> None:
        """Never an error: it would end a thread with a traceback, and whether the storage is lost is told by
        the next thing that is asked of it."""
        with suppress(Exception):
            super().record_heartbeat(trial_id)


def open_storage(url: str) -> Any:
    """Raises ConfigError where it is no database that a study can be kept in."""
    shown, parsed = hidden(url), _parsed(url)
    if _in_memory(parsed):
        raise ConfigError(
            f"storage is {shown!r}, a database in memory, which a search's threads cannot share; give"
            " sqlite:///FILE"
        )
    for tried in range(1, TRIES + 1):
        try:
            return _opened(url, parsed)
        except ConfigError:
            raise
        except sqlalchemy.exc.NoSuchModuleError as error:
            raise ConfigError(f"storage is {shown!r}, which is no kind that keeps trials; {KINDS}") from error
        except ImportError as error:
            raise ConfigError(
                f"storage is {shown!r}, whose driver is not installed; run `pip install"
                " 'foredraft[postgres]'`, or what another database needs"
            ) from error
        except Exception as error:  # drivers raise what they like
            made = "already exists" in str(error) or isinstance(error, sqlalchemy.exc.IntegrityError)
            if tried == TRIES or not made:
                reason = _without(parsed.password, failure(error) or _one_line(error))
                raise ConfigError(
                    f"storage is {shown!r}, which cannot be used ({reason}); give sqlite:///FILE in a folder"
                    " that there is, or the URL of a database that runs"
                ) from error
            time.sleep(tried / 10)
    raise AssertionError


def failure(error: BaseException | None) -> str | None:
    """What a database said that let it come to this error; None where none did."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.SQLAlchemyError):
            return _one_line(getattr(error, "orig", None) or error)
        if isinstance(error, KeyError) and models.NOT_FOUND_MSG in error.args:
            return "the study is no longer in it"
        error = error.__cause__ or error.__context__
    return None


def hidden(url: str) -> str:
    """It, without its password; also where it is no URL, so that nobody can tell where that begins."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
        shown = str(parsed.render_as_string(hide_password=True)) if parsed.password else url
    except (sqlalchemy.exc.ArgumentError, ValueError):
        scheme, rest = re.fullmatch(r"(?s)(\w[\w+.-]*:/*|)(.*)", url).groups()  # type: ignore[union-attr]
        _, at, place = rest.rpartition("@")
        shown = scheme + (f"***@{place}" if at else re.sub(r"(?s):.*", ":***", rest))
    return re.sub(r"(?i)(pass\w*=)[^&;\s]*", r"\1***", shown)


def _parsed(url: str) -> Any:
    try:
        return sqlalchemy.engine.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:  # which holds the password
        raise ConfigError(f"storage is {hidden(url)!r}, which is no URL; {KINDS}") from error


def _in_memory(url: Any) -> bool:
    if url.get_backend_name() != "sqlite":
        return False
    return not url.database or ":memory:" in url.database or url.query.get("mode") == "memory"


def _opened(url: str, parsed: Any) -> Any:
    sqlite = parsed.get_backend_name() == "sqlite"
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if sqlite else {}
    engine = sqlalchemy.create_engine(parsed, **options)
    try:
        _check_owner(engine, hidden(url), alone=sqlite)
    finally:
        engine.dispose()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = Storage(
            url.replace("{", "{{").replace("}", "}}"),  # Optuna takes it for a template
            engine_kwargs=options,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=1),
        )
    try:
        with storage.engine.begin() as connection:  # says now that it may only be read
            connection.execute(sqlalchemy.text("UPDATE studies SET study_name = study_name WHERE 1 = 0"))
    except Exception:
        storage.engine.dispose()
        raise
    return storage


def _check_owner(engine: Any, shown: str, alone: bool) -> None:
    """Refuse a database of another program's before Optuna makes its tables there. alone: one that is a
    file, where studies do not lie beside other tables."""
    known = models.BaseModel.metadata.tables
    found = sqlalchemy.inspect(engine)

    def is_optunas(table: str) -> bool:
        if table not in known:
            return False
        return {column["name"] for column in found.get_columns(table)} == set(known[table].columns.keys())

    tables = found.get_table_names()
    if OWN in tables and is_optunas(OWN):
        return
    # without it, all may be Optuna's: another process is making them, or died while it did
    others = [table for table in tables if not is_optunas(table)]
    if not alone:
        others = [table for table in others if table in known or table == REVISIONS]
    if others:
        raise ConfigError(
            f"storage is {shown!r}, a database of another program's, whose table {others[0]!r} is none of a"
            " study's; it stays as it is: give one that is empty, or a file that is not there yet"
        )


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _without(password: Any, words: str) -> str:
    return words.replace(str(password), "***") if password else words
