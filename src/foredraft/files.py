"""Write files atomically: into a temporary file beside the target, which is then renamed.

The content is on the disk before the name is. A symbolic link stays a link; a pipe or a device is written in
place. Every failure is a ConfigError that names the option whose value is the file.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foredraft.errors import ConfigError

TEXT = "utf-8-sig"  # of files that people write: without the mark with which editors of Windows begin them
TEMPORARY = ".new-"  # first characters of the names of temporary files
PROBE = 64 << 10  # bytes that a check writes: a full disk may still take a few, within the folder's entry
NO_FILE = "it is no file"  # why it is not read, in place of an error of the system
PRIVATE = 0o600  # mode of a file that this user alone may read
RACES = 100  # attempts to rename a folder, each of which another process may come before
_unfinished: set[Path] = set()  # what `replacing` and `replacing_folder` are writing


def check_place(file: Path, option: str) -> None:
    """Check that a file can be written, before the work whose result it will hold."""
    with errors_named(file, option):
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise ConfigError(option=option, value=str(file), remedy="give a file in a folder that exists")
        if _is_replaceable(file):
            probe(_temporary(file.resolve()))
        elif file.is_char_device():
            with file.open("wb", buffering=0) as opened:
                opened.write(b"")  # not a byte more: a terminal would show it
        elif file.is_socket() or not os.access(file, os.W_OK):  # opening a pipe would wait for a reader
            raise ConfigError("which cannot be written", option=option, value=str(file), remedy="give a file")


def check_folder_place(folder: Path, option: str, *, kept: bool = False) -> None:
    """Check that a folder can be written, before the work whose result it will hold."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("which is no folder", option=option, value=str(folder), remedy="give a new folder")
    with errors_named(folder, option):
        place = folder.absolute() if kept else folder.absolute().parent
        while not place.exists():
            place = place.parent
        probe(place / f"{TEMPORARY}{secrets.token_hex(4)}")


def probe(file: Path) -> None:
    """Write a new file as a real one will be, and remove it."""
    with replacing(file) as new:
        new.write_bytes(bytes(PROBE))
    file.unlink()


def is_no_file(path: Path) -> bool:
    """Return whether something else than a file lies at a path: opening a pipe would wait for a writer."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # the second: no file can have such a name
        return False


def discard_unfinished() -> None:
    """Remove the files that are being written, for a process that ends without leaving its blocks."""
    for path in list(_unfinished):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_whole(file: Path, content: str | bytes, option: str, *, private: bool = False) -> None:
    """Write a file atomically; an existing file is replaced, or kept where writing fails."""
    data = content.encode() if isinstance(content, str) else content
    with errors_named(file, option):
        if not _is_replaceable(file):
            file.write_bytes(data)
            return
        with replacing(file.resolve()) as new:  # the target of a link, so that the link itself stays
            if private:
                new.touch(PRIVATE)
            new.write_bytes(data)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path for a new file, which takes the place of `file` when the block ends without an error.

    Of several processes each writes a file of its own, and the last rename wins.
    """
    new = _temporary(file)
    _unfinished.add(new)
    try:
        yield new
        _flush(new)
        new.replace(file)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        _unfinished.discard(new)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which takes the place of `folder` when the block ends without an error.

    A reader sees the old folder, the new one, or for an instant none. Of several processes the last one
    stays.
    """
    new, old = _temporary(folder), _temporary(folder)
    new.mkdir()
    _unfinished.add(new)
    try:
        yield new
        for file in new.iterdir():
            _flush(file)
        _put(new, folder, old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        _unfinished.discard(new)


def _put(new: Path, folder: Path, old: Path) -> None:
    """Give a new folder its name; what had the name takes another."""
    for left in reversed(range(RACES)):
        try:
            with suppress(FileNotFoundError):  # there is none, or another process moved it
                folder.rename(old)
            new.rename(folder)
            return
        except OSError as error:
            raced = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and left  # another process was faster
            if not raced:
                with suppress(OSError):
                    old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)


def _flush(file: Path) -> None:
    """Wait until the content of a file is on the disk."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_replaceable(file: Path) -> bool:
    """Return whether the file is a regular file or absent; a pipe or a device must not be renamed over."""
    return file.is_file() or not file.exists()


def _temporary(file: Path) -> Path:
    """Return a new name beside a file."""
    return file.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{file.name}")


@contextmanager
def errors_named(
    place: Path, option: str, remedy: str = "", problem: str = "which cannot be written"
) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the option, whose value is the place."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{problem} ({error.strerror})", option=option, value=str(place), remedy=remedy
        ) from error
