"""The user's cache folder: results that later runs reuse, as one file per key.

The cache folder is $FOREDRAFT_CACHE, else `foredraft/` in $XDG_CACHE_HOME or ~/.cache; an empty
FOREDRAFT_CACHE turns the cache off. Each kind of content has its own folder of JSON documents under JSON
keys, which hold everything that the content depends on. Other files lie beside a document that holds their
digest, or of a large file its `state`, since to hash it would take longer than to use it.

A reader sees a whole file or none. Only content that this user wrote is believed: a regular file of this
user, in a folder of this user, where no other user can write either, or rename a folder on the way to them.
Folders above may belong to root; in a sticky folder others cannot rename them; a group of this user alone
counts as the user. Without user ids (Windows), only a file's kind and size are checked. No state of the
folder is an error.
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
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from foredraft.files import TEMPORARY, remove, replacing

logger = logging.getLogger(__name__)

VARIABLE = "FOREDRAFT_CACHE"
PRIVATE_CACHE = f"set {VARIABLE} to a folder that only you can write"  # a remedy
DIGITS = 32  # of a file name: half of the SHA-256 of its key, which no two keys share in practice
ABANDONED = 3600.0  # seconds after which a temporary file has no writer: compiling takes up to four minutes
MAX_BYTES = 2**28  # of a file that is read whole; the largest that Foredraft keeps have a few MB
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not wait for a writer
DISK_SHARE = 4  # a kind's files take one part in so many of what would be free without them
ROOT = 0  # user id


def cache_folder(kind: str = "") -> Path | None:
    """Return the folder, which need not exist, of one kind of content or of all; None: the cache is off."""
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
    return None if folder is None else folder / (_digest_of(key)[:DIGITS] + suffix)


def read(kind: str, key: Any) -> Any | None:
    """Return the document under a key, unchecked; None where it is missing, broken or foreign."""
    path = keyed_path(kind, key)
    try:
        found = json.loads(_read_bytes(path) or "")
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
    with _failures_logged(path), _replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def find_file(kind: str, key: Any, suffix: str, *, large: bool = False) -> Path | None:
    """Return the file under a key that `new_file` stored; None where it is missing, broken or foreign."""
    path = keyed_path(kind, key, suffix)
    if path is None or not (large or read_bytes(kind, key, suffix) is not None):
        return None
    real = Path(os.path.realpath(path))
    with suppress(OSError):
        if large:  # its state also tells whether its owner or its mode changed
            os.utime(real.with_suffix(".json"))  # the time of its last use
        return real if not large or read(kind, key) == state(real) else None
    return None


def state(file: Path) -> list[int]:
    """Return what tells a file from what it was, and from another in its place; no program sets the last."""
    status = file.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def read_bytes(kind: str, key: Any, suffix: str) -> bytes | None:
    """Return the content of the file under a key; None where it is missing, broken or foreign."""
    digest = read(kind, key)
    content = None if digest is None else _read_bytes(keyed_path(kind, key, suffix))
    return content if content is not None and hashlib.sha256(content).hexdigest() == digest else None


def write_bytes(kind: str, key: Any, suffix: str, content: bytes) -> None:
    """Store a file under a key, in place of an earlier one. A failure is only logged."""
    with _failures_logged(keyed_path(kind, key, suffix)), new_file(kind, key, suffix) as new:
        if new is not None:
            new.write_bytes(content)


@contextmanager
def _failures_logged(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.debug("the cache cannot hold %s (%s)", path, error)


@contextmanager
def new_file(kind: str, key: Any, suffix: str, *, large: bool = False) -> Iterator[Path | None]:
    """Yield a path for a new file under a key, kept if the block ends without an error; None where the cache
    is off.

    What the block leaves beside it, under names that begin with its own, is removed some time later.
    """
    path = keyed_path(kind, key, suffix)
    if path is None:
        yield None
        return
    with _replacing(path) as new:
        yield new
        digest = None if large else hashlib.sha256(new.read_bytes()).hexdigest()
    write(kind, key, digest or state(path))


def keep_newest(kind: str, suffix: str, most: int, more: int = 0) -> bool:
    """Remove all but the newest `most` files of a kind, as many as a share of the disk holds beside `more`
    bytes.

    A large file is as new as its last use. A failure is ignored.
    """
    folder = cache_folder(kind)
    with suppress(OSError):
        if folder is None:
            return True
        make_folder(folder)
        files = sorted(folder.glob(f"*{suffix}"), key=_last_use, reverse=True)
        taken = [*accumulate((file.stat().st_size for file in files), initial=more)]
        share = (shutil.disk_usage(folder).free + taken[-1] - more) // DISK_SHARE
        if more > share:
            return False
        for file in files[min(most, bisect_right(taken, share) - 1) :]:
            file.unlink()
            file.with_suffix(".json").unlink(missing_ok=True)
    return True


def _last_use(file: Path) -> int:
    document = file.with_suffix(".json")
    return (document if document.exists() else file).stat().st_mtime_ns


def shut(path: Path) -> None:
    """Shut other users out of a file, or of a folder and the files in it; a permissive umask lets them in."""
    for each in (path, *(path.iterdir() if path.is_dir() else ())):
        each.chmod(each.stat().st_mode & stat.S_IRWXU)


def sweep(folder: Path, *prefixes: str) -> None:
    """Remove what killed writers left: this user's entries with these prefixes, older than ABANDONED."""
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                status = entry.lstat()
                is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
                if entry.name.startswith(prefixes) and is_own and time.time() - status.st_mtime >= ABANDONED:
                    remove(entry)


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


class NotPrivateError(PermissionError):
    """A file or folder belongs to another user, or other users can write it; `strerror` says which."""


def check_folder(folder: Path) -> Path:
    """Check that this user alone can write a folder, and return its path without symbolic links."""
    real = Path(os.path.realpath(folder, strict=True))
    _check(real, os.stat(real))
    for above in real.parents:
        _check(above, os.stat(above), above=True)
    return real


def read_private(file: Path) -> bytes:
    """Return the content of a file that this user alone can write."""
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
    """Check that this user alone can write a file, in a folder that `check_folder` returned."""
    _check(file, os.stat(file))


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone."""
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
