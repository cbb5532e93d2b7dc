"""The studies in the cache folder: a database that is damaged or foreign is set aside, and a new one begins."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from foredraft.errors import ConfigError
from foredraft.tune.study import StudyStorage
from tests.support.foreign import as_another_user


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "studies" / "studies.db"


def names() -> set[str]:
    """Return the names of the stored studies."""
    opened = StudyStorage(None).storage
    found = {study.study_name for study in opened.get_all_studies()}
    opened.engine.dispose()
    return found


def store(name: str) -> None:
    storage = StudyStorage(None)
    storage.open_study(name)
    storage.storage.engine.dispose()


def set_aside(database: Path) -> list[str]:
    return sorted(path.name for path in database.parent.iterdir() if ".broken" in path.name)


def overwrite(database: Path) -> None:
    database.write_bytes(b"no database" * 1000)


def cut(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])


def spoil_a_page(database: Path) -> None:
    """Overwrite the pages past the schema, which opening the database does not read."""
    content = bytearray(database.read_bytes())
    content[-4096 * 8 :] = b"\xff" * (4096 * 8)
    database.write_bytes(content)


def open_to_others(database: Path) -> None:
    database.chmod(0o646)


@pytest.mark.parametrize("change", [overwrite, cut, spoil_a_page, open_to_others])
def test_a_database_that_cannot_be_trusted_is_set_aside(
    database: Path, caplog: pytest.LogCaptureFixture, change: object
) -> None:
    assert callable(change)
    store("first")
    assert names() == {"first"}
    change(database)
    with caplog.at_level("WARNING", "foredraft"):
        store("second")
    [told] = [record.getMessage() for record in caplog.records]
    assert "the cached studies are set aside" in told
    assert names() == {"second"} and "studies.db.broken" in set_aside(database)


def test_a_locked_or_empty_database_is_not_damaged(database: Path) -> None:
    store("first")
    with closing(sqlite3.connect(database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        from foredraft.tune.study import _unusable_because

        assert _unusable_because(database) is None
    database.write_bytes(b"")
    store("second")
    assert names() == {"second"} and not set_aside(database)


@pytest.mark.parametrize("variable", ["FOREDRAFT_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_folder_whose_path_is_too_long_is_refused_in_one_line(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE", raising=False)
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    with pytest.raises(
        ConfigError, match=r"no studies can be written to .* \(File name too long\); set"
    ) as error:
        StudyStorage(None)
    assert len(str(error.value)) < 300


def test_a_cache_folder_that_others_can_write_is_refused(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store("first")
    database.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="studies can be written by other users; set FOREDRAFT_CACHE to"):
        StudyStorage(None)
    database.parent.chmod(0o700)
    as_another_user(monkeypatch)
    with pytest.raises(ConfigError, match="belongs to another user; set FOREDRAFT_CACHE to"):
        StudyStorage(None)
