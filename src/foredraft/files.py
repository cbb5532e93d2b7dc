"""Files that are whole or absent: written beside their place, then renamed.

Contract: a link goes on to be one, and what is no regular file, a pipe or a device, is written to in place.
`option` is the one whose value the file is; every error is a ConfigError that names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foredraft.errors import ConfigError

__all__ = ["check_place", "write_whole"]


def check_place(file: Path, option: str) -> None:
    """Refuse a file that cannot be written, before there is anything to write. One that is there stays so."""
    with _told(file, option):
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise ConfigError(f"{option} is {str(file)!r}; give a file in a folder that there is")
        if _replaceable(file):
            beside = _beside(file)
            beside.touch()
            beside.unlink()


def write_whole(file: Path, text: str, option: str) -> None:
    """Write UTF-8 text; a file that is there is replaced, and kept where that fails."""
    with _told(file, option):
        if not _replaceable(file):
            file.write_text(text, encoding="utf-8")
            return
        beside = _beside(file)
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(file.resolve())
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise


def _replaceable(file: Path) -> bool:
    return file.is_file() or not file.exists()


def _beside(file: Path) -> Path:
    place = file.resolve()
    return place.with_name(f".{place.name}.{os.getpid()}")


@contextmanager
def _told(file: Path, option: str) -> Iterator[None]:
    """What the system refuses, in words."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} is {str(file)!r}, which cannot be written ({error.strerror})") from error
