"""Compile the C kernels: for a CPU of this machine, or for all levels of CPUs that a wheel carries.

This file imports only Python's standard library, because the build of the wheel (`hatch_build.py`) runs it
where neither PyTorch nor this package is installed. The compiler is GCC or Clang.
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

HERE = Path(__file__).parent
SOURCES = ("kernels.c", *sorted(path.name for path in HERE.glob("*.inc")))
# The sources say themselves which products and sums are fused.
FLAGS = ("-O3", "-fPIC", "-pthread", "-Wno-psabi", "-ffp-contract=off")
# GCC copies vectors in pieces of 16 bytes by default, and reading them whole then waits for the pieces: with
# AVX2, products take 2 to 4 times as long. GCC 12 and later know these flags, for x86 alone.
WHOLE_COPIES = ("-mmove-max=512", "-mstore-max=512")
COMPILERS = (["cc"], ["gcc"])
LIBRARIES = HERE / "libraries"  # of an installed wheel: one of each level, and the manifest
MANIFEST = "manifest.json"  # {"sources": digest of the sources, "libraries": {level: digest of its library}}
TIMEOUT = 600.0  # seconds for one command of the compiler; compiling takes some 30 on a free core


@dataclass(frozen=True, slots=True)
class Level:
    name: str  # its name
    flags: tuple[str, ...]  # the compiler's flags for it
    needs: frozenset[str]  # the instruction sets of such a CPU, in Linux's names
    adds: str  # what it has over the next lower level, for people
    zig: str  # Zig's name of such a CPU

    def plus(self, name: str, adds: str, **sets: str) -> Level:
        """Return the level with further instruction sets: names of GCC and Zig -> names of Linux."""
        flags = (f"-m{each.replace('_', '-')}" for each in sets)
        needs = self.needs | {*sets.values()}
        return Level(name, (*self.flags, *flags), needs, adds, "+".join([self.zig, *sets]))


@dataclass(frozen=True, slots=True)
class System:
    levels: tuple[Level, ...]  # its levels of CPUs, the best first; the sources distinguish no more
    suffix: str  # the end of a library's name
    triple: str  # Zig's name of the oldest version
    tag: str  # the wheel's tag for that version


_SETS_V3 = frozenset("cx16 lahf_lm popcnt sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_SETS_V4 = _SETS_V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_V3 = Level("x86-64-v3", ("-march=x86-64-v3",), _SETS_V3, "AVX2", "x86_64_v3")
_V4 = Level("x86-64-v4", ("-march=x86-64-v4",), _SETS_V4, "AVX-512", "x86_64_v4")
_VNNI = _V4.plus("x86-64-v4-vnni", "AVX-512 VNNI", avx512vnni="avx512_vnni")
_BF16 = _VNNI.plus("x86-64-v4-bf16", "AVX-512 BF16", avx512bf16="avx512_bf16")
_AMX = _BF16.plus("x86-64-v4-amx", "AMX", amx_tile="amx_tile", amx_bf16="amx_bf16")
_X86 = (_AMX, _BF16, _VNNI, _V4, _V3.plus("x86-64-v3-vnni", "AVX-VNNI", avxvnni="avx_vnni"), _V3)
# Neoverse V1 has the products of Armv8.6 without the rest of it.
_V8_2 = frozenset("atomics asimdrdm asimdhp asimddp".split())
_DOTS, _ZIG_DOTS = "-march=armv8.2-a+fp16+dotprod", "generic+v8_2a+fullfp16+dotprod"
_MATRICES, _I8MM = "products of int8 and bfloat16 matrices", _V8_2 | {"i8mm", "bf16"}
_ARM64 = (
    Level("arm64-i8mm", (f"{_DOTS}+i8mm+bf16",), _I8MM, _MATRICES, f"{_ZIG_DOTS}+i8mm+bf16"),
    Level("arm64-dotprod", (_DOTS,), _V8_2, "dot products of int8", _ZIG_DOTS),
    Level("arm64", ("-march=armv8-a",), frozenset(), "NEON", "generic"),
)
SYSTEMS = {
    "linux-x86_64": System(_X86, ".so", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
    "linux-aarch64": System(_ARM64, ".so", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "macos-x86_64": System((_V4, _V3), ".dylib", "x86_64-macos.11.0", "macosx_11_0_x86_64"),
    "macos-arm64": System(_ARM64, ".dylib", "aarch64-macos.11.0", "macosx_11_0_arm64"),
}


def this_system() -> System | None:
    name = {"darwin": "macos"}.get(sys.platform, sys.platform)
    return SYSTEMS.get(f"{name}-{platform.machine()}") if sys.maxsize > 2**32 else None


LEVELS = () if (_system := this_system()) is None else _system.levels  # of this system, the best first
SUFFIX = ".so" if _system is None else _system.suffix
# Where no level serves: a CPU of none, or a compiler that knows none. Tuned for Zen, GCC takes some sums of
# products apart, and others not: a row would depend on those beside it.
_ON_ARM = platform.machine() in ("arm64", "aarch64")
_NATIVE = ("-mcpu=native",) if _ON_ARM else ("-march=native", "-mtune=generic")
NATIVE = Level("native", _NATIVE, frozenset(), "", "native")


def compiler() -> list[str] | None:
    """Return the C compiler as the start of a command: $CC, else cc or gcc; None: there is none."""
    named = os.environ.get("CC", "").split()
    for program, *arguments in [named] if named else COMPILERS:
        if (found := shutil.which(program)) is not None:
            return [found, *arguments]
    return None


def build(command: list[str], path: Path, target: tuple[str, ...] = NATIVE.flags) -> None:
    objects = path.with_suffix(".o")
    try:
        optional = WHOLE_COPIES if accepts(command, WHOLE_COPIES) else ()
        flags = (*FLAGS, *target, *optional, "-c")
        _run(*command, *flags, str(HERE / SOURCES[0]), "-o", str(objects))
        _run(*command, "-shared", str(objects), "-o", str(path), "-lm")
    finally:
        objects.unlink(missing_ok=True)


def build_levels(folder: Path, system: System, command: list[str] | None = None) -> list[Path]:
    """Compile the library of each level, by Zig if no command is given; return them and their manifest."""
    paths = {level.name: folder / f"{level.name}{system.suffix}" for level in system.levels}
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", system.triple, "-g0", "-s"]

    def compile_level(level: Level) -> None:
        flags = (f"-mcpu={level.zig}",) if command is None else level.flags
        build(command or zig, paths[level.name], flags)

    with ThreadPoolExecutor() as pool:
        [*pool.map(compile_level, system.levels)]
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"sources": sources_digest(), "libraries": digests}, indent=1) + "\n")
    return [*paths.values(), manifest]


def describe_compiler(command: list[str]) -> list[str]:
    return [_run(*command, "--version"), *command[1:], *FLAGS, *WHOLE_COPIES]


def sources_digest() -> str:
    parts = [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in SOURCES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def functions() -> list[str]:
    text = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SOURCES)
    suffixes = re.findall(r"^#define SUFFIX (\w+)$", text, re.MULTILINE)
    found = re.findall(r"^(?:void|int) (NAME\()?(foredraft_\w+)\)?\(", text, re.MULTILINE)
    return sorted(name + suffix for template, name in found for suffix in (suffixes if template else [""]))


def accepts(command: list[str], flags: tuple[str, ...]) -> bool:
    try:
        _run(*command, *flags, "-E", "-x", "c", os.devnull)
    except subprocess.CalledProcessError:
        return False
    return True


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
    ).stdout
