"""The kernels: the library that the wheel carries for this CPU, else one compiled here and kept in the cache.

Contract: `library` returns the loaded kernels or None, and `unavailable_because` returns the reason for None.
A library is loaded only if its content has the digest that was noted when it was made, and if it has every
function that the sources define. A library of the cache is also of this user alone (`user_cache`). The cache
key holds everything that a compiled file depends on: sources, compiler, flags and CPU.

The wheel's library comes first. On every level it was as fast as one compiled for the CPU itself, since the
sources distinguish no more than the levels do, and it needs neither seconds at the first start nor a cache.
And its bits are the same before and after a compiler is installed or renewed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from foredraft import user_cache
from foredraft.kernels import building
from foredraft.kernels.machine import describe_cpu
from foredraft.kernels.shipped import find_shipped, no_shipped_because

__all__ = ["declare", "library", "must_compile", "unavailable_because"]

logger = logging.getLogger(__name__)

KIND = "kernels"  # of the user's cache
SUFFIX = ".so"
NO_MEMORY = 1  # a result of the kernels, as in kernels.c
ELSEWHERE = "foredraft-kernels-"  # first characters of the names of folders for kernels that are not kept


def library() -> ctypes.CDLL | None:
    """Return the kernels; None where there are none for this CPU and none can be compiled."""
    found = _library_or_reason()
    return None if isinstance(found, str) else found


def must_compile() -> bool:
    """Return whether the first call of `library` in this process compiles the kernels, for seconds."""
    if _library_or_reason.cache_info().currsize or find_shipped() is not None:
        return False
    command = building.compiler()
    try:
        return command is not None and user_cache.find_file(KIND, _cache_key(command), SUFFIX) is None
    except (OSError, subprocess.SubprocessError):
        return True


def unavailable_because() -> str | None:
    """Return why `library` returns None, as a clause of an error message; None where it does not."""
    found = _library_or_reason()
    return found if isinstance(found, str) else None


def declare(function: Any, arguments: tuple[type, ...], *, allocates: bool = False) -> Any:
    """Declare the argument types of a C function, and return the function.

    Args:
        function: A function of the library.
        arguments: Its ctypes argument types.
        allocates: The function allocates work memory and returns NO_MEMORY where it gets none. Calls of the
            declared function then raise MemoryError, and their outputs hold nothing of use.
    """
    function.argtypes, function.restype = arguments, ctypes.c_int if allocates else None
    if allocates:
        function.errcheck = _check_memory
    return function


def _check_memory(result: int, *_: Any) -> int:
    if result & NO_MEMORY:
        raise MemoryError("the kernels got no work memory; decode fewer sequences at once (max_batch)")
    return result


@functools.cache
def _library_or_reason() -> ctypes.CDLL | str:
    if (path := find_shipped()) is not None:
        try:
            return open_library(path)
        except OSError as error:  # built for another C library, for instance
            logger.warning("the kernels of this installation cannot be loaded (%s)", error)
    command = building.compiler()
    if command is None:
        return f"{no_shipped_because()}, and {_no_compiler_because()}"
    try:
        return _compiled(command)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernels cannot be compiled ({_reason(error)})"


def _no_compiler_because() -> str:
    """Return why there is no C compiler, as a clause."""
    named = os.environ.get("CC")
    return (
        f"CC is {named!r}, which is not a program" if named else "no C compiler was found (CC may name one)"
    )


def _cache_key(command: list[str]) -> dict[str, Any]:
    return {
        "compiler": building.describe_compiler(command),
        "cpu": describe_cpu(),
        "sources": building.sources_digest(),
    }


def _compiled(command: list[str]) -> ctypes.CDLL:
    """Return kernels compiled here: from the cache, else for the cache, else for this process alone."""
    key = _cache_key(command)
    if (kept := user_cache.find_file(KIND, key, SUFFIX)) is not None:
        try:
            return open_library(kept)
        except OSError as error:
            logger.debug("%s cannot be loaded and is compiled again (%s)", kept, error)
    failed: Exception | None = None
    try:
        with user_cache.new_file(KIND, key, SUFFIX) as new:
            if new is not None:
                return _build(command, new)
    except (OSError, subprocess.CalledProcessError) as error:  # read-only, full, foreign, or mounted noexec
        failed = error
    built = _built_elsewhere(command)
    if failed is not None:
        # The cache warned of a folder that others can write.
        level = logging.INFO if isinstance(failed, user_cache.NotPrivateError) else logging.WARNING
        reason = _reason(failed)
        logger.log(level, "the kernels are compiled at every start: the cache cannot hold them (%s)", reason)
    return built


def _built_elsewhere(command: list[str]) -> ctypes.CDLL:
    """Return kernels compiled in a temporary folder, for this process alone."""
    user_cache.sweep(Path(tempfile.gettempdir()), ELSEWHERE)
    with tempfile.TemporaryDirectory(prefix=ELSEWHERE) as folder:  # a loaded library outlives its file
        return _build(command, Path(folder) / f"kernels{SUFFIX}")


def _build(command: list[str], path: Path) -> ctypes.CDLL:
    building.build(command, path)
    return open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library of kernels, after its content was checked: loading runs code of it.

    Raises:
        OSError: It cannot be loaded, or it lacks a function.
    """
    opened = ctypes.CDLL(str(path))
    if missing := [name for name in building.functions() if not hasattr(opened, name)]:
        raise OSError(f"{path.name} has no function {missing[0]}")
    return opened


def _reason(error: Exception) -> str:
    """Return why the compiler or the system failed, on one line: of a compiler's output, the first error."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (output or str(error)).splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines or ["unknown"]
    return errors[0].strip()
