"""The kernels, compiled once for this very CPU by the C compiler that is there, and kept in the user's cache.

Contract: `library` gives the loaded kernels or None, and `unavailable_because` says why there are
none. What is kept is named by all that could change it: source, compiler, flags and CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from foredraft.kernels.machine import cache_folder, describe_cpu

__all__ = ["compiler", "library", "loaded", "unavailable_because"]

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("kernels.c", "passes.inc", "rows.inc")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = ("cc", "gcc")
SECONDS = 120  # that compiling may take; it takes two


def compiler() -> str | None:
    """The C compiler: $CC, or one by its usual name."""
    named = os.environ.get("CC")
    return next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)


@functools.cache
def _found() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    command = compiler()
    if command is None:
        return "there is no C compiler (CC may name one)"
    try:
        return _load(command)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        return f"they cannot be compiled ({_first_error(why)})"


def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be compiled or loaded."""
    found = _found()
    return None if isinstance(found, str) else found


def unavailable_because() -> str | None:
    """Why there is no library."""
    found = _found()
    return found if isinstance(found, str) else None


def loaded() -> ctypes.CDLL | None:
    """The kernels, if somebody has asked for them: nothing is compiled for this."""
    return library() if _found.cache_info().currsize else None


def _load(command: str) -> ctypes.CDLL:
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory() as passing:  # once loaded, a file may go
            return _built(command, Path(passing) / "kernels.so")
    kept = folder / "kernels" / f"{_digest(command)}.so"
    if kept.is_file():
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # broken: built anew
            logger.debug("%s cannot be loaded", kept)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
            made = _built(command, Path(beside) / kept.name)
            os.replace(Path(beside) / kept.name, kept)
            return made
    except PermissionError:  # a cache that cannot be written to
        with tempfile.TemporaryDirectory() as passing:
            return _built(command, Path(passing) / "kernels.so")


def _built(command: str, path: Path) -> ctypes.CDLL:
    """Compiled and loaded. OpenMP is not linked: its functions are PyTorch's own, so that both use one team
    of threads."""
    made = path.with_suffix(".o")
    for arguments in (
        (*FLAGS, "-c", str(HERE / SOURCES[0]), "-o", str(made)),
        ("-shared", str(made), "-o", str(path), "-lm"),
    ):
        subprocess.run([command, *arguments], check=True, capture_output=True, text=True, timeout=SECONDS)
    return ctypes.CDLL(str(path))


def _digest(command: str) -> str:
    version = subprocess.run(
        [command, "--version"], check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout
    parts = [version, *FLAGS, *describe_cpu(), *((HERE / name).read_text() for name in SOURCES)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _first_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["unknown"]
    return errors[0].strip()
