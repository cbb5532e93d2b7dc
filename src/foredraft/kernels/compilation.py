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
from typing import Any

from foredraft.kernels.machine import describe_cpu
from foredraft.user_cache import keyed_path, replacing

__all__ = ["compiler", "declare", "library", "unavailable_because"]

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("kernels.c", "passes.inc", "attention.inc", "fused.inc", "vocab.inc")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = (["cc"], ["gcc"])
SECONDS = 120  # that compiling may take; it takes two


def compiler() -> list[str] | None:
    """The C compiler, as the beginning of a command: $CC, or one by its usual name."""
    named = os.environ.get("CC", "").split()
    for program, *arguments in [named] if named else COMPILERS:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    return None


@functools.cache
def _found() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    command = compiler()
    if command is None:
        named = os.environ.get("CC")
        return (
            f"CC is {named!r}, which is no program" if named else "there is no C compiler (CC may name one)"
        )
    try:
        return _load(command)
    except (OSError, subprocess.SubprocessError) as error:
        told = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        return f"they cannot be compiled ({_first_error(told or str(error))})"


def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be compiled or loaded."""
    found = _found()
    return None if isinstance(found, str) else found


def unavailable_because() -> str | None:
    """Why there is no library."""
    found = _found()
    return found if isinstance(found, str) else None


def declare(run: Any, arguments: tuple[type, ...], *, allocates: bool = False) -> Any:
    """Say what a kernel takes; gives it back. One that allocates memory for its work raises MemoryError where
    there is none, and has decided nothing then."""
    run.argtypes, run.restype = arguments, ctypes.c_int if allocates else None
    if allocates:
        run.errcheck = _check_memory
    return run


def _check_memory(failed: int, *_: Any) -> None:
    if failed:
        raise MemoryError("the kernels get no memory to work in; decode fewer sequences at once (max_batch)")


def _load(command: list[str]) -> ctypes.CDLL:
    try:
        if (path := keyed_path("kernels", _key(command), ".so")) is not None:
            return _kept(command, path)
    except (OSError, subprocess.CalledProcessError) as error:  # read-only, full, or nothing may run there
        logger.debug("the cache cannot hold the kernels (%s)", error)
    with tempfile.TemporaryDirectory() as passing:  # once loaded, a file may go
        return _built(command, Path(passing) / "kernels.so")


def _kept(command: list[str], path: Path) -> ctypes.CDLL:
    """Those of the file, made if it is not there; several processes may make it at once."""
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # broken: built anew
            logger.debug("%s cannot be loaded", path)
    with replacing(path) as new:
        return _built(command, new)


def _built(command: list[str], path: Path) -> ctypes.CDLL:
    """Compiled and loaded. OpenMP is not linked: its functions are PyTorch's own, so that both use one team
    of threads."""
    made = path.with_suffix(".o")
    _run(*command, *FLAGS, "-c", str(HERE / SOURCES[0]), "-o", str(made))
    _run(*command, "-shared", str(made), "-o", str(path), "-lm")
    return ctypes.CDLL(str(path))


def _key(command: list[str]) -> dict[str, list[str]]:
    """Return everything that the compiled file depends on."""
    return {
        "compiler": [_run(*command, "--version"), *command[1:], *FLAGS],
        "cpu": describe_cpu(),
        "sources": [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in SOURCES],
    }


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS
    ).stdout


def _first_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["unknown"]
    return errors[0].strip()
