"""Files that this user alone can write: the condition for running or believing what a file holds.

A file passes if it is a regular file of this user, in a folder of this user, and no other user can write
either, or rename a folder on the way to them. So nothing can replace the file between the check and its use.
Folders above it may also belong to root; in a sticky folder, such as /tmp, other users cannot rename them.
A group that holds this user alone counts as this user: many systems let it write by default.

Where the system has no user ids (Windows), only the kind and the size of a file are checked.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["NotPrivateError", "check_file", "check_folder", "make_folder", "read_private"]

MAX_BYTES = 2**28  # of a file that is read whole; the largest that Foredraft keeps have a few MB
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not wait for a writer
ROOT = 0  # user id


class NotPrivateError(PermissionError):
    """A file or folder belongs to another user, or other users can write it; `strerror` says which."""


def check_folder(folder: Path) -> Path:
    """Check that this user alone can write a folder, and return its path without symbolic links.

    Raises:
        NotPrivateError: Another user can write it, or replace it.
        OSError: It does not exist, or it cannot be examined.
    """
    real = Path(os.path.realpath(folder, strict=True))
    _check(real, os.stat(real))
    for above in real.parents:
        _check(above, os.stat(above), above=True)
    return real


def read_private(file: Path) -> bytes:
    """Return the content of a file that this user alone can write.

    Args:
        file: The file, in a folder that `check_folder` returned.

    Raises:
        NotPrivateError: Another user can write it.
        OSError: It cannot be read, is no regular file, or is larger than any that Foredraft keeps.
    """
    descriptor = os.open(file, os.O_RDONLY | NO_WAIT | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise OSError(errno.EINVAL, "no regular file, or too large a file", str(file))
        _check(file, status)
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def check_file(file: Path) -> None:
    """Check that this user alone can write a file, in a folder that `check_folder` returned.

    Raises:
        NotPrivateError: Another user can write it.
        OSError: It cannot be examined.
    """
    _check(file, os.stat(file))


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone.

    Raises:
        OSError: A folder cannot be created.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def _check(path: Path, status: os.stat_result, *, above: bool = False) -> None:
    """Raise NotPrivateError unless this user, or root for a folder `above`, is all that can write a path."""
    if not hasattr(os, "getuid"):
        return
    user = os.getuid()
    if status.st_uid != user and not (above and status.st_uid == ROOT):
        raise NotPrivateError(errno.EACCES, "belongs to another user", str(path))
    if above and status.st_mode & stat.S_ISVTX:
        return
    by_group = status.st_mode & stat.S_IWGRP and not _holds_only(status.st_gid, user)
    if by_group or status.st_mode & stat.S_IWOTH:
        raise NotPrivateError(errno.EACCES, "can be written by other users", str(path))


def _holds_only(group: int, user: int) -> bool:
    """Return whether a group is the private group of a user: it has the user's name, and no other member."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(user).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and {*found.gr_mem} <= {name}
