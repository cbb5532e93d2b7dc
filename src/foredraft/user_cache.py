"""The user's cache folder: results that later runs reuse, as one file per key.

The cache folder is $FOREDRAFT_CACHE, else `foredraft/` in $XDG_CACHE_HOME or ~/.cache. An empty
FOREDRAFT_CACHE turns the cache off: `read` then returns None and `write` does nothing.

Each kind of content has its own folder. A kind's documents are JSON values under JSON keys:

    key = {"machine": describe_cpu(), "model": "ab12...", "dtype": "bfloat16", "threads": 8}
    write("profiles", key, {"step_ms": 4.2})
    read("profiles", key)  # {"step_ms": 4.2}; None under any other key

Other files lie beside a document that holds the digest of their content: `read_bytes` and `write_bytes` for
those that fit into memory, `find_file` and `new_file` for those that are used in their place.

Contract: a key holds everything that the content depends on. A reader sees a whole file or none, also while
several processes write it. Only content that this user wrote is believed: a file whose digest differs, or
that another user could have written, counts as missing; so whatever is kept is shut to other users (`shut`).
The cache only saves time, so no state of the folder is an error for `read`, `write` and `find_file`.

A file is this user's alone if it is a regular file of this user, in a folder of this user, and no other user
can write either, or rename a folder on the way to them. So nothing can replace the file between the check and
its use. Folders above it may also belong to root; in a sticky folder, such as /tmp, other users cannot rename
them. A group that holds this user alone counts as this user: many systems let it write by default. Where the
system has no user ids (Windows), only the kind and the size of a file are checked.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foredraft.files import TEMPORARY, replacing

__all__ = [
    "PRIVATE_CACHE",
    "NotPrivateError",
    "cache_folder",
    "check_file",
    "check_folder",
    "find_file",
    "keep_newest",
    "keyed_path",
    "make_folder",
    "new_file",
    "read",
    "read_bytes",
    "read_private",
    "shut",
    "sweep",
    "write",
    "write_bytes",
]

logger = logging.getLogger(__name__)

VARIABLE = "FOREDRAFT_CACHE"
PRIVATE_CACHE = f"set {VARIABLE} to a folder that only you can write"  # a remedy
DIGITS = 32  # of a file name: half of the SHA-256 of its key, which no two keys share in practice
ABANDONED = 3600.0  # seconds after which a temporary file has no writer: compiling takes up to four minutes
MAX_BYTES = 2**28  # of a file that is read whole; the largest that Foredraft keeps have a few MB
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not wait for a writer
ROOT = 0  # user id


def cache_folder(kind: str = "") -> Path | None:
    """Return the folder of one kind of content, or the whole cache folder; None: the cache is off.

    The folder need not exist.
    """
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) / kind if named else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "foredraft" / kind
    except RuntimeError:  # the user has no home folder
        return None


def keyed_path(kind: str, key: Any, suffix: str = ".json") -> Path | None:
    """Return the path of the file under a key, named by the key's hash; None: the cache is off."""
    folder = cache_folder(kind)
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / (digest[:DIGITS] + suffix)


def read(kind: str, key: Any) -> Any | None:
    """Return the document under a key; None where the cache is off or its file is missing, broken or foreign.

    The caller checks the document's own fields.
    """
    content = _read_bytes(keyed_path(kind, key))
    if content is None:
        return None
    try:
        found = json.loads(content)
        document = found["document"]
        sound = found["key"] == _as_json(key) and found["digest"] == _digest_of(document)
        return document if sound else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def write(kind: str, key: Any, document: Any) -> None:
    """Store a JSON document under a key, in place of an earlier one. A failure is only logged."""
    path = keyed_path(kind, key)
    if path is None:
        return
    digest = _digest_of(_as_json(document))
    text = json.dumps({"key": key, "document": document, "digest": digest}) + "\n"
    try:
        with _replacing(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.debug("the cache cannot hold %s (%s)", path, error)


def find_file(kind: str, key: Any, suffix: str) -> Path | None:
    """Return the file under a key that `new_file` stored; None where it is missing, broken or foreign.

    Until it is used, no other user can replace it.
    """
    path = keyed_path(kind, key, suffix)
    if path is None or read_bytes(kind, key, suffix) is None:
        return None
    return Path(os.path.realpath(path))


def read_bytes(kind: str, key: Any, suffix: str) -> bytes | None:
    """Return the content of the file under a key; None where it is missing, broken or foreign."""
    digest = read(kind, key)
    content = None if digest is None else _read_bytes(keyed_path(kind, key, suffix))
    return content if content is not None and hashlib.sha256(content).hexdigest() == digest else None


def write_bytes(kind: str, key: Any, suffix: str, content: bytes) -> None:
    """Store a file under a key, in place of an earlier one. A failure is only logged."""
    try:
        with new_file(kind, key, suffix) as new:
            if new is not None:
                new.write_bytes(content)
    except OSError as error:
        logger.debug("the cache cannot hold %s (%s)", keyed_path(kind, key, suffix), error)


@contextmanager
def new_file(kind: str, key: Any, suffix: str) -> Iterator[Path | None]:
    """Yield a path for a new file under a key, which is kept when the block ends without an error.

    None is yielded where the cache is off. Files that the block writes beside it and leaves there, under
    names that begin with its own, are removed some time later.

    Raises:
        OSError: The folder or the file cannot be written, or other users can write the folder.
    """
    path = keyed_path(kind, key, suffix)
    if path is None:
        yield None
        return
    with _replacing(path) as new:
        yield new
        digest = hashlib.sha256(new.read_bytes()).hexdigest()
    write(kind, key, digest)


def keep_newest(kind: str, suffix: str, most: int) -> None:
    """Remove all but the newest `most` files of a kind, with their documents. A failure is ignored."""
    folder = cache_folder(kind)
    with suppress(OSError):
        files = [] if folder is None else [*folder.glob(f"*{suffix}")]
        files.sort(key=lambda file: file.stat().st_mtime_ns, reverse=True)
        for file in files[most:]:
            file.unlink()
            file.with_suffix(".json").unlink()


def shut(path: Path) -> None:
    """Shut other users out of a file, or of a folder and the files in it; a permissive umask lets them in.

    Raises:
        OSError: Its mode cannot be changed.
    """
    for each in (path, *(path.iterdir() if path.is_dir() else ())):
        each.chmod(each.stat().st_mode & stat.S_IRWXU)


def sweep(folder: Path, *prefixes: str) -> None:
    """Remove what writers that were killed left in a folder: this user's entries with one of these prefixes.

    Entries younger than ABANDONED may still have a writer, and stay.
    """
    with suppress(OSError):
        for entry in folder.iterdir():
            if entry.name.startswith(prefixes):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: Path) -> None:
    status = entry.lstat()
    if time.time() - status.st_mtime < ABANDONED or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
        return
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file of the cache, as `files.replacing` does, in a folder of this user alone."""
    make_folder(path.parent)
    try:
        folder = check_folder(path.parent)
    except NotPrivateError as error:
        _warn_once(str(error.filename), str(error.strerror))
        raise
    sweep(folder, TEMPORARY)
    with replacing(folder / path.name) as new:
        yield new
        shut(new)


def _read_bytes(path: Path | None) -> bytes | None:
    """Return the content of a file of the cache; None where it cannot be read or is not this user's alone."""
    if path is None:
        return None
    try:
        return read_private(check_folder(path.parent) / path.name)
    except NotPrivateError as error:
        _warn_once(str(error.filename), str(error.strerror))
    except (OSError, MemoryError):
        pass
    return None


@functools.cache
def _warn_once(path: str, reason: str) -> None:
    logger.warning("the cache does without %s, which %s; %s", path, reason, PRIVATE_CACHE)


def _digest_of(document: Any) -> str:
    """Return the digest of a document as a file gives it back."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _as_json(value: Any) -> Any:
    """Return a value as a file gives it back: tuples become lists."""
    return json.loads(json.dumps(value))


# --- files that no other user could have written ------------------------------------------------------------


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
