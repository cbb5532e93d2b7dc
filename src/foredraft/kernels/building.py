"""Compile the C kernels, with any compiler that takes GCC's flags and vector extensions."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

__all__ = [
    "FLAGS",
    "HERE",
    "NATIVE",
    "SOURCES",
    "build",
    "compiler",
    "describe_compiler",
    "functions",
    "sources_digest",
]

HERE = Path(__file__).parent
SOURCES = ("kernels.c", "passes.inc", "attention.inc", "fused.inc", "vocab.inc")
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
# GCC copies vectors in pieces of 16 bytes by default, and reading them whole then waits for the pieces: with
# AVX2, products take 2 to 4 times as long. GCC 12 and later know these flags, for x86 alone.
WHOLE_COPIES = ("-mmove-max=512", "-mstore-max=512")
NATIVE = ("-march=native",)
COMPILERS = (["cc"], ["gcc"])
TIMEOUT = 120.0  # seconds for one command of the compiler; compiling takes a few


def compiler() -> list[str] | None:
    """Return the C compiler as the start of a command: $CC, else cc or gcc; None: there is none."""
    named = os.environ.get("CC", "").split()
    for program, *arguments in [named] if named else COMPILERS:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    return None


def build(command: list[str], path: Path, target: tuple[str, ...] = NATIVE) -> None:
    """Compile the kernels to a shared library.

    The linker gets no -fopenmp: the OpenMP functions resolve to those that PyTorch loaded, so that both use
    one team of threads.

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
