"""The libraries of kernels that the wheel carries, one for each level of x86-64.

Contract: a library is used only if the CPU has every instruction that it was compiled for, and if it was made
of the sources beside it. Its content must have the digest of the manifest, so a damaged file is not run. Its
owner is not checked: the files of a package are as trustworthy as its code.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from foredraft.kernels import building
from foredraft.kernels.machine import cpu_flags

__all__ = ["find_shipped", "no_shipped_because"]

logger = logging.getLogger(__name__)


def find_shipped() -> Path | None:
    """Return the best library that the wheel carries for this CPU; None where it carries no whole one."""
    levels = _fitting()
    if not levels or (digests := _read_manifest()) is None:
        return None
    for level in levels:
        path = building.LIBRARIES / f"{level}.so"
        if level in digests:
            if _digest_of(path) == digests[level]:
                return path
            logger.warning("%s is damaged and is not used; install foredraft again", path)
    return None


def no_shipped_because() -> str:
    """Return why `find_shipped` returns None, as a clause of an error message."""
    if not building.LIBRARIES.is_dir():
        return "this installation carries no kernels"
    if not _fitting():
        return "this installation carries no kernels for this CPU"
    return "the kernels that this installation carries are damaged or of another version"


def _fitting() -> list[str]:
    """Return the names of the levels that this CPU has, the best first."""
    if not building.has_levels():
        return []
    flags = cpu_flags()
    return [level.name for level in building.LEVELS if level.needs <= flags]


def _read_manifest() -> dict[str, str] | None:
    """Return level -> digest; None where there is no manifest, or where the sources were changed since."""
    try:
        found = json.loads((building.LIBRARIES / building.MANIFEST).read_text(encoding="utf-8"))
        return dict(found["libraries"]) if found["sources"] == building.sources_digest() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
