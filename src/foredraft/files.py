"""Write files atomically: into a temporary file beside the target, which is then renamed.

A symbolic link stays a link. A pipe or a device is written in place. Every failure is a ConfigError that
names the option whose value is the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foredraft.errors import ConfigError

__all__ = ["check_place", "write_whole"]


def check_place(file: Path, option: str) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    An existing file is left as it is.

    Args:
        file: The file to be written later.
        option: The option whose value the file is.

    Raises:
        ConfigError: The folder does not exist, or the file cannot be written.
    """
    with _errors_named(file, option):
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise ConfigError(option=option, value=str(file), remedy="give a file in a folder that exists")
        if _is_replaceable(file):
            temporary = _temporary(file)
            temporary.touch()
            temporary.unlink()


def write_whole(file: Path, text: str, option: str) -> None:
    """Write text to a file atomically; an existing file is replaced, or kept where writing fails.

    Args:
        file: The file to write.
        text: The content, written as UTF-8.
        option: The option whose value the file is.

    Raises:
        ConfigError: The file cannot be written.
    """
    with _errors_named(file, option):
        if not _is_replaceable(file):
            file.write_text(text, encoding="utf-8")
            return
        temporary = _temporary(file)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file.resolve())
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def _is_replaceable(file: Path) -> bool:
    """Return whether the file is a regular file or absent; a pipe or a device must not be renamed over."""
    return file.is_file() or not file.exists()


def _temporary(file: Path) -> Path:
    target = file.resolve()  # the target of a link, so that the link itself stays
    return target.with_name(f".{target.name}.{os.getpid()}")


@contextmanager
def _errors_named(file: Path, option: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"which cannot be written ({error.strerror})", option=option, value=str(file)
        ) from error
