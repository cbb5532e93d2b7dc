"""The user's cache: its folder, the documents that it returns, and the errors that it only logs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from foredraft import user_cache
from foredraft.user_cache import cache_folder, find_file, keyed_path, new_file, read, sweep, write
from tests.support.foreign import NOT_PRIVATE, as_another_user

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
    write("profiles", KEY, DOCUMENT)
    path = keyed_path("profiles", KEY)
    assert path is not None
    whole = json.loads(path.read_text())
    contents: dict[str, Any] = {
        "a list": [1],
        "a string": "word",
        "no key": {name: whole[name] for name in ("document", "digest")},
        "no document": {name: whole[name] for name in ("key", "digest")},
        "no digest": {name: whole[name] for name in ("key", "document")},
        "another key": whole | {"key": {"model": "cd34", "threads": [1, 2]}},
        "another document": whole | {"document": DOCUMENT | {"milliseconds": 4.5}},
    }
    files = {name: json.dumps(content).encode() for name, content in contents.items()}
    return files | {
        "empty": b"",
        "cut": json.dumps(whole).encode()[:-9],
        "not UTF-8": b"\xff\xfe\x00",
        "nested too deep": b"[" * 100_000,
    }


BROKEN = (
    "a list", "a string", "no key", "no document", "no digest", "another key", "another document",
    "empty", "cut", "not UTF-8", "nested too deep",
)  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
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


# --- content of others ----------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    user_cache._warn_once.cache_clear()
    caplog.set_level("WARNING", user_cache.__name__)
    return caplog


@pytest.mark.parametrize("change", NOT_PRIVATE)
def test_a_document_that_others_could_have_written_counts_as_missing(
    change: str, folder: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("profiles", KEY, DOCUMENT)
    path = keyed_path("profiles", KEY)
    assert path is not None
    reason = NOT_PRIVATE[change](path, monkeypatch)
    assert read("profiles", KEY) is read("profiles", KEY) is None
    [record] = warnings.records
    assert reason in record.getMessage() and "set FOREDRAFT_CACHE to a folder that" in record.getMessage()


def test_nothing_is_written_into_a_folder_that_others_can_write(
    folder: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (folder / "profiles").mkdir(parents=True)
    (folder / "profiles").chmod(0o777)
    write("profiles", KEY, DOCUMENT)
    assert not list((folder / "profiles").iterdir())
    assert len(warnings.records) == 1


def test_a_permissive_umask_does_not_open_the_cache(folder: Path) -> None:
    before = os.umask(0)
    try:
        write("profiles", KEY, DOCUMENT)
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    assert read("profiles", KEY) == DOCUMENT


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_document_is_not_waited_for() -> None:
    path = keyed_path("profiles", KEY)
    assert path is not None
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert read("profiles", KEY) is None


@pytest.mark.parametrize("variable", ["FOREDRAFT_CACHE", "XDG_CACHE_HOME"])
def test_a_path_that_is_too_long_is_no_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is None and find_file("profiles", KEY, ".so") is None


# --- files ----------------------------------------------------------------------------------------------


def stored(content: bytes = b"content") -> Path:
    with new_file("kernels", KEY, ".so") as new:
        assert new is not None
        new.write_bytes(content)
    path = keyed_path("kernels", KEY, ".so")
    assert path is not None
    return path


def test_a_file_is_found_under_its_key() -> None:
    assert find_file("kernels", KEY, ".so") is None
    path = stored()
    found = find_file("kernels", KEY, ".so")
    assert found is not None and found.samefile(path) and found.read_bytes() == b"content"
    assert find_file("kernels", {}, ".so") is None


@pytest.mark.parametrize("content", [b"", b"conten", b"contend", None])
def test_a_file_that_does_not_hold_what_was_written_counts_as_missing(content: bytes | None) -> None:
    path = stored()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert find_file("kernels", KEY, ".so") is None
    assert find_file("kernels", KEY, ".so") is None
    stored()
    assert find_file("kernels", KEY, ".so") is not None


def test_a_file_without_its_digest_counts_as_missing() -> None:
    path = stored()
    path.with_suffix(".json").unlink()
    assert find_file("kernels", KEY, ".so") is None


def test_a_file_of_another_user_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    as_another_user(monkeypatch)
    assert find_file("kernels", KEY, ".so") is None


def test_a_cache_that_is_off_has_no_place_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    with new_file("kernels", KEY, ".so") as new:
        assert new is None
    assert find_file("kernels", KEY, ".so") is None


# --- what killed writers leave --------------------------------------------------------------------------


def leave(path: Path, seconds: float) -> Path:
    """Make a file, or a folder with a file where the name ends in a slash, that is this old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == "":
        path.mkdir()
        (path / "kernels.o").write_text("half")
    else:
        path.write_text("half")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def test_a_write_removes_what_killed_writers_left(folder: Path) -> None:
    kind = folder / "profiles"
    old = [leave(kind / ".new-0badcafe-file.so", 1e5), leave(kind / ".new-0badcafe-file.o", 1e5)]
    young = leave(kind / ".new-1badcafe-file.so", 60)
    other = leave(kind / "notes.txt", 1e5)
    write("profiles", KEY, DOCUMENT)
    assert not any(path.exists() for path in old)
    assert young.exists() and other.exists()


def test_old_folders_of_this_user_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, young = leave(tmp_path / "foredraft-kernels-a", 1e5), leave(tmp_path / "foredraft-kernels-b", 60)
    with monkeypatch.context() as patch:
        as_another_user(patch)
        sweep(tmp_path, "foredraft-kernels-")
        assert old.exists(), "it is another user's"
    sweep(tmp_path, "foredraft-kernels-")
    assert not old.exists() and young.exists()
    sweep(tmp_path / "none", "x")
