"""Only a file that this user alone can write is read; what others could have written is refused."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from foredraft import user_cache
from foredraft.user_cache import NotPrivateError, check_folder, make_folder, read_private
from tests.support.foreign import NOT_PRIVATE

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs user ids")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "kind"
    make_folder(folder)
    (folder / "file").write_bytes(b"content")
    return folder / "file"


def content(file: Path) -> bytes:
    return read_private(check_folder(file.parent) / file.name)


def test_a_file_of_this_user_is_read(file: Path) -> None:
    assert content(file) == b"content"
    assert file.parent.stat().st_mode & 0o777 == file.parents[1].stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", NOT_PRIVATE)
def test_a_file_that_others_could_have_written_is_refused(
    change: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NOT_PRIVATE[change](file, monkeypatch)
    with pytest.raises(NotPrivateError):
        content(file)


def test_a_sticky_folder_above_may_be_open(file: Path) -> None:
    file.parents[1].chmod(0o1777)
    assert content(file) == b"content"


@pytest.mark.parametrize("path", ["file", "folder", "folder above"])
def test_only_a_private_group_may_write(path: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {"file": file, "folder": file.parent, "folder above": file.parents[1]}[path]
    opened.chmod(opened.stat().st_mode | 0o020)
    own = pwd.getpwuid(os.getuid()).pw_name
    for name, members, private in (
        (own, [], True), (own, [own], True), (own, [own, "other"], False), ("staff", [own], False),
    ):  # fmt: skip
        monkeypatch.setattr(
            grp,
            "getgrgid",
            lambda group, given=(name, members): grp.struct_group((given[0], "x", group, given[1])),
        )
        if private:
            assert content(file) == b"content"
        else:
            with pytest.raises(NotPrivateError, match="can be written by other users"):
                content(file)


def test_a_group_without_a_name_is_not_private(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    file.chmod(0o660)
    with pytest.raises(NotPrivateError):
        content(file)


def test_a_link_is_followed_to_a_folder_that_is_checked(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file.parent)
    assert content(tmp_path / "link" / "file") == b"content"
    assert check_folder(tmp_path / "link") == file.parent.resolve()
    file.parent.chmod(0o777)
    with pytest.raises(NotPrivateError):
        content(tmp_path / "link" / "file")


def test_only_regular_files_of_a_size_that_fits_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no regular file"):
        read_private(file.parent)
    os.mkfifo(file.parent / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_private(file.parent / "pipe")
    monkeypatch.setattr(user_cache, "MAX_BYTES", 6)
    with pytest.raises(OSError, match="too large"):
        read_private(file)
