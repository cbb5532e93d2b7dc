"""Compile the C kernels once for this CPU, and keep the result in the user's cache.

Contract: `library` returns the loaded kernels or None, and `unavailable_because` returns the reason for None.
The cache key holds everything that the compiled file depends on: sources, compiler, flags and CPU.
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

__all__ = ["compiler", "declare", "library", "must_compile", "unavailable_because"]

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("kernels.c", "passes.inc", "attention.inc", "fused.inc", "vocab.inc")
FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-Wno-psabi")
COMPILERS = (["cc"], ["gcc"])
TIMEOUT = 120  # seconds for one command of the compiler; compiling takes a few


def compiler() -> list[str] | None:
    """Return the C compiler as the start of a command: $CC, else cc or gcc; None: there is none."""
    named = os.environ.get("CC", "").split()
    for program, *arguments in [named] if named else COMPILERS:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    return None


def library() -> ctypes.CDLL | None:
    """Return the kernels; None where they cannot be compiled or loaded."""
    found = _library_or_reason()
    return None if isinstance(found, str) else found


def must_compile() -> bool:
    """Return whether the first call of `library` in this process compiles the kernels, for seconds."""
    command = compiler()
    if command is None or _library_or_reason.cache_info().currsize:
        return False
    try:
        path = keyed_path("kernels", _cache_key(command), ".so")
    except (OSError, subprocess.SubprocessError):
        return True
    return path is None or not path.is_file()


def unavailable_because() -> str | None:
    """Return why `library` returns None, as a clause of an error message; None where it does not."""
    found = _library_or_reason()
    return found if isinstance(found, str) else None


def declare(function: Any, arguments: tuple[type, ...], *, allocates: bool = False) -> Any:
    """Declare the argument types of a C function, and return the function.

    Args:
        function: A function of the library.
        arguments: Its ctypes argument types.
        allocates: The function allocates work memory and returns nonzero where it gets none. Calls of the
            declared function then raise MemoryError, and their outputs hold nothing of use.
    """
    function.argtypes, function.restype = arguments, ctypes.c_int if allocates else None
    if allocates:
        function.errcheck = _check_memory
    return function


def _check_memory(failed: int, *_: Any) -> None:
    if failed:
        raise MemoryError("the kernels got no work memory; decode fewer sequences at once (max_batch)")


@functools.cache
def _library_or_reason() -> ctypes.CDLL | str:
    command = compiler()
    if command is None:
        named = os.environ.get("CC")
        return (
            f"CC is {named!r}, which is not a program"
            if named
            else "no C compiler was found (CC may name one)"
        )
    try:
        return _load(command)
    except (OSError, subprocess.SubprocessError) as error:
        output = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
        return f"the kernels cannot be compiled ({_first_error(output or str(error))})"


def _load(command: list[str]) -> ctypes.CDLL:
    """Load the kernels, from the cache where it holds them or can hold them."""
    try:
        if (path := keyed_path("kernels", _cache_key(command), ".so")) is not None:
            return _load_cached(command, path)
    except (OSError, subprocess.CalledProcessError) as error:  # read-only, full, or mounted noexec
        logger.debug("the cache cannot hold the kernels (%s)", error)
    with tempfile.TemporaryDirectory() as folder:  # a loaded library outlives its file
        return _build(command, Path(folder) / "kernels.so")


def _load_cached(command: list[str], path: Path) -> ctypes.CDLL:
    if path.is_file():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            logger.debug("%s cannot be loaded and is compiled again", path)
    with replacing(path) as new:
        return _build(command, new)


def _build(command: list[str], path: Path) -> ctypes.CDLL:
    """Compile the kernels to `path` and load them.

    The linker gets no -fopenmp: the OpenMP functions resolve to those that PyTorch loaded, so that both use
    one team of threads.
    """
    objects = path.with_suffix(".o")
    _run(*command, *FLAGS, "-c", str(HERE / SOURCES[0]), "-o", str(objects))
    _run(*command, "-shared", str(objects), "-o", str(path), "-lm")
    return ctypes.CDLL(str(path))


def _cache_key(command: list[str]) -> dict[str, list[str]]:
    return {
        "compiler": [_run(*command, "--version"), *command[1:], *FLAGS],
        "cpu": describe_cpu(),
        "sources": [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in SOURCES],
    }


def _run(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
    ).stdout


def _first_error(text: str) -> str:
    """Return the first line of a compiler's output that names an error."""
    errors = [line for line in text.splitlines() if "error" in line] or text.splitlines() or ["unknown"]
    return errors[0].strip()
