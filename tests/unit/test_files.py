"""Files are written atomically: complete, or the old content stays; unwritable files are refused early."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError
from foredraft.files import check_place, replacing, replacing_folder, write_whole


def test_a_failed_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report"
    write_whole(file, "öne\n", "json")
    assert file.read_bytes() == "öne\n".encode()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(ConfigError, match=r"json is '.*report', which cannot be written \(No space left\)"):
        write_whole(file, "two", "json")
    assert file.read_bytes() == "öne\n".encode() and list(tmp_path.iterdir()) == [file]


def test_a_symbolic_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text", "json")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    check_place(pipe, "json")
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "text", "json")
    if pipe.is_fifo():
        reader.join(10)
    assert pipe.is_fifo() and read == ["text"]


def test_an_unwritable_file_is_refused(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(ConfigError, match="html is .*; give a file in a folder that exists"):
            check_place(file, "html")
    for length in (254, 300):  # at 254 only the temporary file's name is too long
        with pytest.raises(ConfigError, match=r"html is 'x+\.\.\., which cannot be .* \(File name too"):
            check_place(Path("x" * length), "html")
    (tmp_path / "file").write_text("kept")
    check_place(tmp_path / "file", "html")
    assert (tmp_path / "file").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1


def test_an_interrupted_writer_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
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


def replace_again_and_again(barrier: Any, folder: Path, own: str, errors: Any) -> None:
    for _ in range(200):
        barrier.wait(30)
        try:
            with replacing_folder(folder) as new:
                (new / "file").write_text(own)
        except OSError as error:
            errors.put(str(error))


def test_processes_that_replace_a_folder_at_once_do_not_fail(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, errors, folder = context.Barrier(3), context.Queue(), tmp_path / "folder"
    writers = [
        context.Process(target=replace_again_and_again, args=(barrier, folder, f"writer {n}", errors))
        for n in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0] and errors.empty()
    assert (folder / "file").read_text().startswith("writer") and list(tmp_path.iterdir()) == [folder]


def test_a_failed_replacement_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = tmp_path / "folder", Path.rename
    with replacing_folder(folder) as new:
        (new / "file").write_text("old")

    def refuse(self: Path, target: Path) -> Path:
        if target == folder and not (self / "file").read_text() == "old":
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Read-only"), replacing_folder(folder) as new:
        (new / "file").write_text("new")
    assert (folder / "file").read_text() == "old" and list(tmp_path.iterdir()) == [folder]


def test_the_content_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, replace = list[str](), os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    write_whole(tmp_path / "file", "text", "json")
    assert done == ["fsync", "rename"] and (tmp_path / "file").read_text() == "text"
