"""Compile the C kernels: for the CPU that compiles, or for the levels of x86-64 that a wheel carries.

Contract: this file imports only Python's standard library and nothing of this package, because the build of
the wheel (`hatch_build.py`) runs it where neither PyTorch nor the package is installed. The compiler is one
that takes GCC's flags and vector extensions.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "FLAGS",
    "HERE",
    "LEVELS",
    "LIBRARIES",
    "MANIFEST",
    "NATIVE",
    "SOURCES",
    "Level",
    "build",
    "build_levels",
    "compiler",
    "describe_compiler",
    "functions",
    "has_levels",
    "sources_digest",
]

HERE = Path(__file__).parent
SOURCES = (
    "kernels.c",
    "pool.inc",
    "norms.inc",
    "passes.inc",
    "coding.inc",
    "codes.inc",
    "tiles.inc",
    "attention.inc",
    "fused.inc",
    "inputs.inc",
    "pairs.inc",
    "vocab.inc",
)
FLAGS = ("-O3", "-fPIC", "-pthread", "-Wno-psabi")
# GCC copies vectors in pieces of 16 bytes by default, and reading them whole then waits for the pieces: with
# AVX2, products take 2 to 4 times as long. GCC 12 and later know these flags, for x86 alone.
WHOLE_COPIES = ("-mmove-max=512", "-mstore-max=512")
# Tuned for Zen, GCC takes some sums of products apart, and others not: a row would depend on those beside it.
NATIVE = ("-march=native", "-mtune=generic")
COMPILERS = (["cc"], ["gcc"])
LIBRARIES = HERE / "libraries"  # of an installed wheel: <level>.so, and the manifest
MANIFEST = "manifest.json"  # {"sources": digest of the sources, "libraries": {level: digest of its library}}
TIMEOUT = 120.0  # seconds for one command of the compiler; compiling takes a few


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of CPUs that one library runs on.

    Attributes:
        name: Its name.
        flags: The compiler's flags for it.
        needs: The flags that /proc/cpuinfo lists for such a CPU.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset("cx16 lahf_lm popcnt sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
# The best first. The sources distinguish AVX-512F, AVX-512 BF16 and AMX.
_BF16, _V4_BF16 = ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}
LEVELS = (
    Level("x86-64-v4-amx", (*_BF16, "-mamx-tile", "-mamx-bf16"), _V4_BF16 | {"amx_tile", "amx_bf16"}),
    Level("x86-64-v4-bf16", _BF16, _V4_BF16),
    Level("x86-64-v4", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", ("-march=x86-64-v3",), _V3),
)


def has_levels() -> bool:
    """Return whether this system is one that the levels are for: Linux on x86-64, in 64 bits."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def compiler() -> list[str] | None:
    """Return the C compiler as the start of a command: $CC, else cc or gcc; None: there is none."""
    named = os.environ.get("CC", "").split()
    for program, *arguments in [named] if named else COMPILERS:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    return None


def build(command: list[str], path: Path, target: tuple[str, ...] = NATIVE) -> None:
    """Compile the kernels to a shared library.

    Args:
        command: The compiler, as `compiler` returns it.
        path: The library. An object file with the suffix `.o` lies beside it while the compiler runs.
        target: The flags that name the CPUs.

    Raises:
        OSError, subprocess.SubprocessError: The compiler fails.
    """
    objects = path.with_suffix(".o")
    try:
        flags = (*FLAGS, *target, *_optional(command), "-c")
        _run(*command, *flags, str(HERE / SOURCES[0]), "-o", str(objects))
        _run(*command, "-shared", str(objects), "-o", str(path), "-lm")
    finally:
        objects.unlink(missing_ok=True)


def build_levels(command: list[str], folder: Path) -> list[Path]:
    """Compile the library of each level into a folder, and write their manifest.

    Returns:
        The files.

    Raises:
        OSError, subprocess.SubprocessError: The compiler fails.
    """
    paths = {level.name: folder / f"{level.name}.so" for level in LEVELS}
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda level: build(command, paths[level.name], level.flags), LEVELS)]
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"sources": sources_digest(), "libraries": digests}, indent=1) + "\n")
    return [*paths.values(), manifest]


def describe_compiler(command: list[str]) -> list[str]:
    """Return what a library compiled here depends on, besides the sources and the CPU."""
    return [_run(*command, "--version"), *command[1:], *FLAGS, *NATIVE, *WHOLE_COPIES]


def sources_digest() -> str:
    """Return the SHA-256 digest of the sources."""
    parts = [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in SOURCES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def functions() -> list[str]:
    """Return the names of the functions that the sources define for Python."""
    text = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SOURCES)
    suffixes = re.findall(r"^#define SUFFIX (\w+)$", text, re.MULTILINE)
    found = re.findall(r"^(?:void|int) (NAME\()?(foredraft_\w+)\)?\(", text, re.MULTILINE)
    return sorted(name + suffix for template, name in found for suffix in (suffixes if template else [""]))


def _optional(command: list[str]) -> tuple[str, ...]:
    """Return WHOLE_COPIES where the compiler knows them."""
    try:
        _run(*command, *WHOLE_COPIES, "-E", "-x", "c", os.devnull)
    except subprocess.CalledProcessError:
        return ()
    return WHOLE_COPIES


def _run(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
    ).stdout
