"""The user's cache: its folder, the documents that it returns, and the errors that it only logs."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from foredraft import user_cache
from foredraft.user_cache import cache_folder, keyed_path, read, replacing, write

KEY = {"model": "ab12", "threads": (1, 2)}
DOCUMENT = {"milliseconds": 4.25, "name": "größer"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FOREDRAFT_CACHE": "/a"}, "/a"),
        ({"FOREDRAFT_CACHE": "/a", "XDG_CACHE_HOME": "/x"}, "/a"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/foredraft"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/foredraft"),
        ({"HOME": "/h"}, "/h/.cache/foredraft"),
        ({"FOREDRAFT_CACHE": ""}, None),
    ],
    ids=str,
)
def test_environment_variables_choose_the_folder(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOREDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == (None if expected is None else Path(expected))
    assert cache_folder("plans") == (None if expected is None else Path(expected) / "plans")


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_folder() is None


def test_a_document_is_read_under_its_own_kind_and_key(folder: Path) -> None:
    assert read("profiles", KEY) is None
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) == DOCUMENT
    assert read("profiles", {"threads": [1, 2], "model": "ab12"}) == DOCUMENT, "the same key in JSON"
    assert read("shapes", KEY) is None
    assert read("profiles", KEY | {"threads": (1, 3)}) is None
    assert [path for path in folder.rglob("*") if path.is_file()] == [keyed_path("profiles", KEY)]


def test_a_document_takes_the_place_of_the_one_before() -> None:
    write("profiles", KEY, DOCUMENT)
    write("profiles", KEY, [1])
    assert read("profiles", KEY) == [1]


def broken_files() -> dict[str, bytes]:
    whole = {"key": {"model": "ab12", "threads": [1, 2]}, "document": DOCUMENT}
    contents: dict[str, Any] = {
        "a list": [1],
        "a string": "word",
        "no key": {"document": DOCUMENT},
        "no document": {"key": whole["key"]},
        "another key": whole | {"key": {"model": "cd34", "threads": [1, 2]}},
    }
    files = {name: json.dumps(content).encode() for name, content in contents.items()}
    return files | {
        "empty": b"",
        "cut": json.dumps(whole).encode()[:-9],
        "not UTF-8": b"\xff\xfe\x00",
        "nested too deep": b"[" * 100_000,
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_broken_or_foreign_file_counts_as_missing_and_is_replaced(name: str) -> None:
    write("profiles", KEY, DOCUMENT)
    path = keyed_path("profiles", KEY)
    assert path is not None
    path.write_bytes(broken_files()[name])
    assert read("profiles", KEY) is None
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) == DOCUMENT


def test_an_empty_variable_turns_the_cache_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is None and keyed_path("profiles", KEY) is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_failed_write_is_only_logged(
    code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with caplog.at_level("DEBUG", user_cache.__name__):
        write("profiles", KEY, DOCUMENT)
    assert os.strerror(code) in caplog.text
    assert read("profiles", KEY) is None


def test_a_folder_in_the_way_is_no_error(folder: Path) -> None:
    path = keyed_path("profiles", KEY)
    assert path is not None
    (path / "inside").mkdir(parents=True)
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is None
    assert list(path.parent.iterdir()) == [path], "nothing lies beside the file"


def test_a_cache_folder_that_is_a_file_is_no_error(folder: Path) -> None:
    folder.write_text("")
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is None


def test_an_interrupted_writer_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with replacing(path) as new:
        new.write_text("whole")
    with suppress(KeyboardInterrupt), replacing(path) as new:
        new.write_text("ha")
        raise KeyboardInterrupt
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_writers_at_the_same_time_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"  # the outer block ends last
