"""The kernels: the CPU and its level, the library that the wheel carries for it, else one compiled here and
kept.

A library of the wheel is used if the CPU has every instruction of its level, if it was made of the sources
beside it, and if its content has the digest of the manifest. It comes first: its bits do not change with a
compiler. A library compiled here is for the best level that the CPU has and the compiler knows.
FOREDRAFT_CPU_LEVEL names a level in place of the best one, on which the bits of results depend.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft import user_cache
from foredraft.errors import ConfigError, shortened
from foredraft.kernels import building
from foredraft.kernels.building import NATIVE, Level

logger = logging.getLogger(__name__)

VARIABLE = "FOREDRAFT_CPU_LEVEL"
MACOS = {  # what macOS calls instruction sets, in lower case -> what Linux calls them
    "sse4.2": "sse4_2", "avx1.0": "avx", "lahf": "lahf_lm", "lzcnt": "abm", "feat_lse": "atomics",
    "feat_rdm": "asimdrdm", "feat_fp16": "asimdhp", "feat_dotprod": "asimddp", "feat_i8mm": "i8mm",
    "feat_bf16": "bf16",
}  # fmt: skip


def describe_cpu() -> list[str]:
    """Return the CPU's model and instruction sets, as the system names them, and the best usable level."""
    named = ("model name", "flags", "Features", "CPU part", "machdep.cpu.brand_string")
    return [
        platform.machine(),
        platform.processor(),
        torch.backends.cpu.get_cpu_capability(),
        *(line for line in _system_lines() if line.startswith(named)),
        usable_levels()[0].name,
    ]


def usable_levels() -> list[Level]:
    """Return the levels that the kernels may use, the best first: the CPU's, or the one named."""
    levels, name = [*cpu_levels(), NATIVE], os.environ.get(VARIABLE, "").strip()
    if chosen := [level for level in levels if name in ("", level.name)]:
        return chosen
    names = ", ".join(level.name for level in levels)
    problem = f"the environment variable {VARIABLE} is {shortened(name)}, which is no level of this CPU"
    raise ConfigError(problem, remedy=f"give one of {names}, or unset it")


def cpu_levels() -> list[Level]:
    features = cpu_features()
    return [level for level in building.LEVELS if level.needs <= features]


def cpu_features() -> frozenset[str]:
    """Return the CPU's instruction sets that the system allows, in Linux's names; none if it tells none."""
    found = set[str]()
    for name, _, value in (line.partition(":") for line in _system_lines()):
        if name.strip() in ("flags", "Features") or name.endswith("features"):
            found.update(value.split())
        elif value.strip() == "1":  # of macOS: hw.optional.arm.FEAT_BF16: 1
            found.add(name.rpartition(".")[2])
    return frozenset(MACOS.get(word.lower(), word.lower()) for word in found)


@functools.cache
def _system_lines() -> list[str]:
    """Return what the system tells of the CPU, as lines "name: value"; on Linux, of the first core."""
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "hw.optional", "machdep.cpu"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()
        with open("/proc/cpuinfo") as info:
            return [line.strip() for line in itertools.takewhile(str.strip, info)]
    except (OSError, subprocess.SubprocessError):
        return []


def find_shipped() -> Path | None:
    """Return the best library that the wheel carries for this CPU, named by its level; None: no whole one."""
    levels, folder = usable_levels(), building.LIBRARIES
    try:
        found = json.loads((folder / building.MANIFEST).read_text(encoding="utf-8"))
        digests = dict(found["libraries"]) if found["sources"] == building.sources_digest() else {}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    for path in (folder / f"{level.name}{building.SUFFIX}" for level in levels if level.name in digests):
        with suppress(OSError):
            if hashlib.sha256(path.read_bytes()).hexdigest() == digests[path.stem]:
                return path
        logger.warning("%s is damaged and is not used; install foredraft again", path)
    return None


KIND = "kernels"  # of the user's cache
NO_MEMORY = 1  # a result of the kernels, as in kernels.c
ELSEWHERE = "foredraft-kernels-"  # first characters of the names of folders for kernels that are not kept


class _Loaded(NamedTuple):
    library: ctypes.CDLL | None
    level: str | None = None
    compiled: bool = False  # here, and not carried by the wheel
    reason: str | None = None  # why there is no library


def library() -> ctypes.CDLL | None:
    return _loaded().library


def level_in_use() -> str | None:
    return _loaded().level


def unavailable_because() -> str | None:
    return _loaded().reason


def describe_level() -> str:
    """Return the level of kernels that there are, and what better ones the CPU lacks, or how to get them."""
    found, has = _loaded(), cpu_levels()
    assert found.level is not None, "there are kernels"
    if has and found.level != has[0].name:
        remedy = "a newer C compiler or the wheel has it" if found.compiled else "install foredraft again"
        remedy = f"unset {VARIABLE}" if os.environ.get(VARIABLE) else remedy
        return f"{found.level}; this CPU has {has[0].name}, too, which may be faster: {remedy}"
    better = itertools.takewhile(lambda level: level.name != found.level, building.LEVELS)
    lacks = [level.adds for level in reversed([*better]) if level not in has]
    return f"{found.level}; this CPU has no {', '.join(lacks)}" if lacks else f"{found.level}, the best"


def must_compile() -> bool:
    """Return whether the first call of `library` in this process compiles the kernels, for seconds."""
    if _loaded.cache_info().currsize or find_shipped() is not None:
        return False
    command = building.compiler()
    try:
        if command is None:
            return False
        key = _cache_key(command, _level_of(command))
        return user_cache.find_file(KIND, key, building.SUFFIX) is None
    except (OSError, subprocess.SubprocessError):
        return True


_declared: dict[str, Any] = {}  # the functions that `kernel` has returned, by name


def kernel(name: str, *arguments: type, allocates: bool = False) -> Any:
    """Return the function foredraft_`name` of the kernels, which there are; it may need work memory."""
    if name not in _declared:
        function = getattr(library(), f"foredraft_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int if allocates else None
        if allocates:
            function.errcheck = _check_memory
        _declared[name] = function  # last, because another thread may call it from now on
    return _declared[name]


def _check_memory(result: int, *_: Any) -> int:
    if result & NO_MEMORY:
        raise MemoryError("the kernels got no work memory; decode fewer sequences at once (max_batch)")
    return result


@functools.cache
def _loaded() -> _Loaded:
    if (path := find_shipped()) is not None:
        try:
            return _Loaded(open_library(path), path.stem)
        except OSError as error:  # built for another C library, for instance
            logger.warning("the kernels of this installation cannot be loaded (%s)", error)
    command = building.compiler()
    if command is None:
        return _Loaded(None, reason=_none_because())
    try:
        level = _level_of(command)
        return _Loaded(_compiled(command, level), level.name, compiled=True)
    except (OSError, subprocess.SubprocessError) as error:
        return _Loaded(None, reason=f"the kernels cannot be compiled ({_reason(error)})")


def _none_because() -> str:
    """Return why there are no kernels where there is no compiler."""
    shipped = "the kernels that this installation carries are damaged or of another version"
    if not building.LIBRARIES.is_dir():
        shipped = "this installation carries no kernels"
    elif not cpu_levels():
        shipped = "this installation carries no kernels for this CPU"
    if named := os.environ.get("CC"):
        return f"{shipped}, and CC is {named!r}, which is not a program"
    return f"{shipped}, and no C compiler was found (CC may name one)"


def _level_of(command: list[str]) -> Level:
    levels = usable_levels()
    return next((level for level in levels if building.accepts(command, level.flags)), levels[-1])


def _cache_key(command: list[str], level: Level) -> dict[str, Any]:
    return {
        "compiler": [*building.describe_compiler(command), *level.flags],
        "cpu": describe_cpu(),
        "sources": building.sources_digest(),
    }


def _compiled(command: list[str], level: Level) -> ctypes.CDLL:
    """Return kernels compiled here: from the cache, else for the cache, else for this process alone."""
    key = _cache_key(command, level)
    if (kept := user_cache.find_file(KIND, key, building.SUFFIX)) is not None:
        try:
            return open_library(kept)
        except OSError as error:
            logger.debug("%s cannot be loaded and is compiled again (%s)", kept, error)
    failed: Exception | None = None
    try:
        with user_cache.new_file(KIND, key, building.SUFFIX) as new:
            if new is not None:
                return _build(command, new, level)
    except (OSError, subprocess.CalledProcessError) as error:  # read-only, full, foreign, or mounted noexec
        failed = error
    user_cache.sweep(Path(tempfile.gettempdir()), ELSEWHERE)
    with tempfile.TemporaryDirectory(prefix=ELSEWHERE) as folder:  # a loaded library outlives its file
        built = _build(command, Path(folder) / f"kernels{building.SUFFIX}", level)
    if failed is not None:
        # The cache warned of a folder that others can write.
        severity = logging.INFO if isinstance(failed, user_cache.NotPrivateError) else logging.WARNING
        message = "the kernels are compiled at every start: the cache cannot hold them (%s)"
        logger.log(severity, message, _reason(failed))
    return built


def _build(command: list[str], path: Path, level: Level) -> ctypes.CDLL:
    building.build(command, path, level.flags)
    return open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
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
