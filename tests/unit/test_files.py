"""Files are written atomically: complete, or the old content stays; unwritable files are refused early."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from foredraft import ConfigError
from foredraft.files import check_place, replacing, write_whole


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
        with pytest.raises(
            ConfigError, match=r"html is 'x+\.\.\., which cannot be written \(File name too long\)"
        ):
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


def test_the_content_is_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync, replace = list[str](), os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    write_whole(tmp_path / "file", "text", "json")
    assert done == ["fsync", "rename"] and (tmp_path / "file").read_text() == "text"
