"""The user's cache: its folder, the documents and files that it returns, and the errors that it only logs."""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, ForedraftError, user_cache
from foredraft.drafters.asset import any_kept
from foredraft.drafters.kangaroo import (
    WEIGHTS,
    adapter_place,
    find_adapter,
    load_adapter,
    read_adapter,
    target_hash,
)
from foredraft.drafters.plan_files import find_plan, keep_plan
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from foredraft.user_cache import (
    NotPrivateError,
    cache_folder,
    check_folder,
    find_file,
    keyed_path,
    make_folder,
    new_file,
    read,
    read_private,
    sweep,
    write,
)
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.foreign import NOT_PRIVATE, as_another_user
from tests.support.limits import no_more_bytes
from tests.support.panics import raising
from tests.unit.test_drafters_plan_files import PLAN

KEY = {"model": "ab12", "threads": (1, 2)}
DOCUMENT = {"milliseconds": 4.25, "name": "größer"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def place(kind: str = "profiles", suffix: str = ".json") -> Path:
    path = keyed_path(kind, KEY, suffix)
    assert path is not None
    return path


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
    monkeypatch.setattr(Path, "home", raising(RuntimeError("no home")))
    assert cache_folder() is None


def test_a_document_is_read_under_its_own_kind_and_key(folder: Path) -> None:
    assert read("profiles", KEY) is None
    write("profiles", KEY, [1])
    write("profiles", KEY, DOCUMENT)  # in its place
    assert read("profiles", KEY) == DOCUMENT
    assert read("profiles", {"threads": [1, 2], "model": "ab12"}) == DOCUMENT, "the same key in JSON"
    assert read("shapes", KEY) is None
    assert read("profiles", KEY | {"threads": (1, 3)}) is None
    assert [path for path in folder.rglob("*") if path.is_file()] == [place()]


Whole = dict[str, Any]
BROKEN: dict[str, Callable[[Whole], Any]] = {
    "a list": lambda whole: [1],
    "a string": lambda whole: "word",
    "no key": lambda whole: {name: whole[name] for name in ("document", "digest")},
    "no document": lambda whole: {name: whole[name] for name in ("key", "digest")},
    "no digest": lambda whole: {name: whole[name] for name in ("key", "document")},
    "another key": lambda whole: whole | {"key": {"model": "cd34", "threads": [1, 2]}},
    "another document": lambda whole: whole | {"document": DOCUMENT | {"milliseconds": 4.5}},
    "empty": lambda whole: b"",
    "cut": lambda whole: json.dumps(whole).encode()[:-9],
    "not UTF-8": lambda whole: b"\xff\xfe\x00",
    "nested too deep": lambda whole: b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_foreign_file_counts_as_missing_and_is_replaced(name: str) -> None:
    write("profiles", KEY, DOCUMENT)
    content = BROKEN[name](json.loads(place().read_text()))
    place().write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert read("profiles", KEY) is None
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) == DOCUMENT


@pytest.mark.parametrize(
    "make",
    [
        lambda: (place() / "inside").mkdir(parents=True),
        lambda: (place().parent.mkdir(parents=True), os.mkfifo(place())),
        lambda: place().parents[1].write_text(""),
    ],
    ids=["a folder", "a pipe", "a file above"],
)
def test_what_is_in_the_way_is_no_error_and_not_waited_for(make: Callable[[], object]) -> None:
    make()
    assert read("profiles", KEY) is None
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) in (None, DOCUMENT)
    assert [*place().parents[1].rglob(".new-*")] == [], "nothing lies beside the file"


def test_a_failed_write_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "mkdir", raising(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with caplog.at_level("DEBUG", user_cache.__name__):
        write("profiles", KEY, DOCUMENT)
    assert os.strerror(errno.EROFS) in caplog.text
    assert read("profiles", KEY) is None


# --- content of others ----------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    user_cache._warn_once.cache_clear()
    caplog.set_level("WARNING", user_cache.__name__)
    return caplog


@pytest.mark.parametrize("change", NOT_PRIVATE)
def test_a_document_that_others_could_have_written_counts_as_missing(
    change: str, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("profiles", KEY, DOCUMENT)
    reason = NOT_PRIVATE[change](place(), monkeypatch)
    assert read("profiles", KEY) is read("profiles", KEY) is None
    [record] = warnings.records
    assert reason in record.getMessage() and "set FOREDRAFT_CACHE to a folder that" in record.getMessage()


def test_nothing_is_written_into_a_folder_of_others(folder: Path, warnings: pytest.LogCaptureFixture) -> None:
    (folder / "profiles").mkdir(parents=True)
    (folder / "profiles").chmod(0o777)
    write("profiles", KEY, DOCUMENT)
    assert not list((folder / "profiles").iterdir()) and len(warnings.records) == 1


@pytest.mark.parametrize("variable", ["FOREDRAFT_CACHE", "XDG_CACHE_HOME"])
def test_a_path_that_is_too_long_is_no_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.setenv(variable, "/" + "x" * 5000)
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is None and find_file("profiles", KEY, ".so") is None
    assert not any_kept("plans") and find_plan(PLAN.model_hash) is None
    with pytest.raises(ConfigError, match=r"which cannot be written \(File name too long\)"):
        keep_plan(PLAN)


# --- files ----------------------------------------------------------------------------------------------


def stored(content: bytes = b"content") -> Path:
    with new_file("kernels", KEY, ".so") as new:
        assert new is not None
        new.write_bytes(content)
    return place("kernels", ".so")


def test_a_file_is_found_under_its_key() -> None:
    assert find_file("kernels", KEY, ".so") is None
    path = stored()
    found = find_file("kernels", KEY, ".so")
    assert found is not None and found.samefile(path) and found.read_bytes() == b"content"
    assert find_file("kernels", {}, ".so") is None


@pytest.mark.parametrize("content", [b"", b"conten", b"contend", None, "no digest"])
def test_a_file_that_does_not_hold_what_was_written_counts_as_missing(
    content: bytes | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.with_suffix(".json" if content else ".so").unlink()
    assert find_file("kernels", KEY, ".so") is find_file("kernels", KEY, ".so") is None
    stored()
    assert find_file("kernels", KEY, ".so") is not None
    as_another_user(monkeypatch)
    assert find_file("kernels", KEY, ".so") is None


def test_an_empty_variable_turns_the_cache_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_CACHE", "")
    write("profiles", KEY, DOCUMENT)
    assert read("profiles", KEY) is keyed_path("profiles", KEY) is None
    with new_file("kernels", KEY, ".so") as new:
        assert new is None
    assert find_file("kernels", KEY, ".so") is None


# --- what killed writers leave --------------------------------------------------------------------------


def leave(path: Path, seconds: float) -> Path:
    """Make a file, or a folder with a file where the name has no suffix, that is this old."""
    file = path if path.suffix else path / "kernels.o"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("half")
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


# --- what is kept beside documents: adapters and plans, damaged or foreign ----------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return Runner(load_decoder(model))


def keep_adapter(model: Path) -> Path:
    kept = adapter_place(target_hash(model))
    assert kept is not None
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_adapter(model, kept)
    return kept


def test_what_is_kept_under_a_permissive_umask_is_believed(model: Path, folder: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write("profiles", KEY, DOCUMENT)
        kept, plan = keep_adapter(model), keep_plan(PLAN)
        save_adapter(model, tmp_path / "adapter")
    finally:
        os.umask(before)
    assert read("profiles", KEY) == DOCUMENT and find_adapter(target_hash(model)) == kept
    assert plan is not None and find_plan(PLAN.model_hash) == PLAN
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    elsewhere = (tmp_path / "adapter" / WEIGHTS).stat().st_mode
    assert elsewhere & 0o044 == 0o044, "there the user's own modes hold"


@pytest.mark.parametrize("change", NOT_PRIVATE)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_an_adapter_that_others_could_have_written_is_not_used(
    name: str, change: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, hash = keep_adapter(model), target_hash(model)
    NOT_PRIVATE[change](kept / name, monkeypatch)
    with pytest.raises(ConfigError, match="adapter is .*which is not used, because"):
        find_adapter(hash)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "empty": lambda file: file.write_bytes(b""),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "missing": Path.unlink,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("spoil", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_damaged_adapter_is_one_line(
    name: str, spoil: Callable[[Path], object], model: Path, runner: Runner
) -> None:
    kept = keep_adapter(model)
    spoil(kept / name)
    with pytest.raises(ForedraftError):
        load_adapter(kept, read_adapter(find_adapter(target_hash(model)) or kept), runner)


@pytest.mark.parametrize("kind", ["profiles", "shapes", "notices", "texts"])
def test_a_full_disk_leaves_what_was_kept(kind: str, folder: Path) -> None:
    user_cache.write(kind, "key", [1])
    with no_more_bytes(3):
        user_cache.write(kind, "key", [2])
        user_cache.write_bytes("vocabularies", "key", ".bytes", b"12345")
    assert user_cache.read(kind, "key") == [1]
    assert user_cache.read_bytes("vocabularies", "key", ".bytes") is None
    assert not [path for path in folder.rglob("*") if path.name.startswith(".new-")]


# --- only a file that this user alone can write is read -----------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "kind"
    make_folder(folder)
    (folder / "file").write_bytes(b"content")
    return folder / "file"


def content(kept: Path) -> bytes:
    return read_private(check_folder(kept.parent) / kept.name)


def test_a_file_of_this_user_is_read(kept: Path) -> None:
    assert content(kept) == b"content"
    assert kept.parent.stat().st_mode & 0o777 == kept.parents[1].stat().st_mode & 0o777 == 0o700
    kept.parents[1].chmod(0o1777)
    assert content(kept) == b"content", "a sticky folder above may be open"


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["file", "folder", "folder above"])
def test_only_a_private_group_may_write(depth: int, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = (kept, *kept.parents)[depth]
    opened.chmod(opened.stat().st_mode | 0o020)
    own = pwd.getpwuid(os.getuid()).pw_name
    for name, members in ((own, []), (own, [own]), (own, [own, "other"]), ("staff", [own]), (None, [])):
        groups = {} if name is None else {opened.stat().st_gid: grp.struct_group((name, "x", 1, members))}
        monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)
        if name == own and set(members) <= {own}:
            assert content(kept) == b"content"
        else:
            with pytest.raises(NotPrivateError, match="can be written by other users"):
                content(kept)


def test_a_link_is_followed_to_a_folder_that_is_checked(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(kept.parent)
    assert content(tmp_path / "link" / "file") == b"content"
    assert check_folder(tmp_path / "link") == kept.parent.resolve()
    kept.parent.chmod(0o777)
    with pytest.raises(NotPrivateError):
        content(tmp_path / "link" / "file")


def test_only_regular_files_of_a_size_that_fits_are_read(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no regular file"):
        read_private(kept.parent)
    os.mkfifo(kept.parent / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_private(kept.parent / "pipe")
    monkeypatch.setattr(user_cache, "MAX_BYTES", 6)
    with pytest.raises(OSError, match="too large"):
        read_private(kept)
