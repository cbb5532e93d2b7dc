"""The user's cache folder: results that later runs reuse, as one file per key.

The cache folder is $FOREDRAFT_CACHE, else `foredraft/` in $XDG_CACHE_HOME or ~/.cache. An empty
FOREDRAFT_CACHE turns the cache off: `read` then returns None and `write` does nothing.

Each kind of content has its own folder. A kind's documents are JSON values under JSON keys:

    key = {"machine": describe_cpu(), "model": "ab12...", "dtype": "bfloat16", "threads": 8}
    write("profiles", key, {"step_ms": 4.2})
    read("profiles", key)  # {"step_ms": 4.2}; None under any other key

Contract: a key holds everything that the document depends on. A reader sees a whole file or none, also while
several processes write it. The cache only saves time, so no state of the folder is an error for `read` and
`write`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "keyed_path", "read", "replacing", "write"]

logger = logging.getLogger(__name__)

VARIABLE = "FOREDRAFT_CACHE"
DIGITS = 32  # of a file name: half of the SHA-256 of its key, which no two keys share in practice


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
    path = keyed_path(kind, key)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["document"] if content["key"] == _as_json(key) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def write(kind: str, key: Any, document: Any) -> None:
    """Store a JSON document under a key, in place of an earlier one. A failure is only logged."""
    path = keyed_path(kind, key)
    if path is None:
        return
    text = json.dumps({"key": key, "document": document}) + "\n"
    try:
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.debug("the cache cannot hold %s (%s)", path, error)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file, which takes the place of `path` when the block ends without an error.

    Several processes may do so at once: each writes a file of its own, and the last rename wins.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = Path(folder) / path.name
        yield new
        os.replace(new, path)


def _as_json(key: Any) -> Any:
    """Return a key as a file gives it back: tuples become lists."""
    return json.loads(json.dumps(key))
