"""Standard output that cannot be written: one line, and before the work where that can be known."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from foredraft.errors import ConfigError

__all__ = ["check_stdout", "writing_stdout"]


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Turn an OSError of stdout into a ConfigError.

    Raises:
        BrokenPipeError: The reader closed the pipe, which is not a failure.
        ConfigError: stdout cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _refused(error.strerror) from error


def check_stdout() -> None:
    """Refuse a stdout that is a file on a full disk.

    Raises:
        ConfigError: It is.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # it is no file, or closed
        return
    if hasattr(os, "fstatvfs") and stat.S_ISREG(os.fstat(descriptor).st_mode):
        system = os.fstatvfs(descriptor)
        if system.f_blocks and not system.f_bavail:  # some systems do not count blocks
            raise _refused(os.strerror(errno.ENOSPC))


def _refused(why: str | None) -> ConfigError:
    return ConfigError(f"stdout cannot be written ({why})", remedy="redirect it to another file")
