"""The kernels that a wheel carries: the best level that the CPU has is loaded, if it is whole and of these sources."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import kernels
from foredraft.kernels import building, compilation
from tests.support.compiling import QUICK, copying_compiler

pytestmark = pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() != "x86_64"
    or building.compiler() is None
    or kernels.library() is None,
    reason="no C compiler, or not Linux on x86-64",
)

X86 = building.SYSTEMS["linux-x86_64"]
NO_COMPILER = " and no C compiler was found (CC may name one)"
BEST, SECOND, THIRD, *_, LEAST = (level.name for level in X86.levels)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return libraries of all levels, which hold the code of the least one."""
    folder = tmp_path_factory.mktemp("made")
    compiler = copying_compiler(tmp_path_factory.mktemp("compiler"), X86.levels[-1].flags)
    building.build_levels(folder, X86, [str(compiler)])
    return folder


@pytest.fixture
def installed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the libraries of an installation on a CPU of the best level, in a process that starts now."""
    folder = tmp_path / "libraries"
    shutil.copytree(made, folder)
    monkeypatch.setattr(building, "LIBRARIES", folder)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "compiler", lambda: None)
    fresh = compilation.functools.cache(compilation._library_or_reason.__wrapped__)
    monkeypatch.setattr(compilation, "_library_or_reason", fresh)
    pretend(monkeypatch, BEST)
    return folder


def pretend(monkeypatch: pytest.MonkeyPatch, level: str | None, *missing: str) -> None:
    found = {each.name: each.needs for each in X86.levels}.get(level or "", frozenset())
    monkeypatch.setattr(compilation, "cpu_features", lambda: found - {*missing})


def loaded(folder: Path) -> str | None:
    library = compilation.library()
    return None if library is None else Path(library._name).relative_to(folder).stem


@pytest.mark.heavy
def test_a_compiled_level_is_of_all_files_that_it_needs(made: Path) -> None:
    names = {f"{level.name}.so" for level in building.LEVELS} | {building.MANIFEST}
    assert {path.name for path in made.iterdir()} == names


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("level", "missing", "chosen"),
    [
        *[(level, (), level) for level in (BEST, SECOND, THIRD, LEAST)],
        (BEST, ("avx512vl",), LEAST),
        (BEST, ("fma",), None),
        (None, (), None),
    ],
)
def test_the_best_level_that_the_cpu_has_is_loaded(
    level: str | None,
    missing: tuple[str, ...],
    chosen: str | None,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, level, *missing)
    assert loaded(installed) == chosen


@pytest.mark.parametrize("level", [BEST, THIRD, LEAST])
def test_the_level_that_the_variable_names_is_loaded_and_no_other(
    level: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compilation.VARIABLE, level)
    assert loaded(installed) == level == compilation.level_in_use()
    compilation._library_or_reason.cache_clear()
    (installed / f"{level}.so").unlink()
    assert loaded(installed) is None


def test_this_cpu_has_the_levels_that_its_flags_say() -> None:
    flags = compilation.cpu_features()
    assert {"fpu", "sse2"} <= flags
    assert compilation.cpu_levels() == [level for level in building.LEVELS if level.needs <= flags]


@pytest.mark.parametrize("change", [lambda b: b[: len(b) // 2], lambda b: b + b"more", lambda b: b""])
def test_a_damaged_library_is_named_and_another_is_loaded(
    change: Callable[[bytes], bytes], installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = installed / f"{BEST}.so"
    damaged.write_bytes(change(damaged.read_bytes()))
    assert loaded(installed) == SECOND
    assert caplog.messages == [f"{damaged} is damaged and is not used; install foredraft again"]


OTHER_SOURCES = {"sources": "0" * 64}
MANIFESTS = ["", "[]", "{}", '{"sources": 3, "libraries": {}}', None, OTHER_SOURCES]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_libraries_without_their_manifest_are_not_loaded(manifest: Any, installed: Path) -> None:
    path = installed / building.MANIFEST
    sound = json.loads(path.read_text())
    path.unlink()
    if manifest is not None:
        path.write_text(manifest if isinstance(manifest, str) else json.dumps(sound | manifest))
    assert loaded(installed) is None
    assert compilation.unavailable_because() == (
        "the kernels that this installation carries are damaged or of another version," + NO_COMPILER
    )


@pytest.mark.heavy
def test_a_library_that_cannot_be_loaded_is_compiled_instead(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, library = installed / building.MANIFEST, installed / f"{BEST}.so"
    content = json.loads(manifest.read_text())
    library.write_bytes(b"for another system")
    content["libraries"][BEST] = hashlib.sha256(library.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(content))
    assert compilation.library() is None, "there is no compiler"
    assert "cannot be loaded" in caplog.text
    monkeypatch.setattr(building, "compiler", lambda: ["cc"])
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, QUICK))
    compilation._library_or_reason.cache_clear()
    assert compilation.library() is not None


@pytest.mark.parametrize(
    ("carried", "reason"),
    [
        (False, "this installation carries no kernels,"),
        (True, "this installation carries no kernels for this CPU,"),
    ],
)
def test_the_reason_names_what_is_missing(
    carried: bool, reason: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if not carried:
        shutil.rmtree(installed)
    pretend(monkeypatch, None)
    assert compilation.unavailable_because() == reason + NO_COMPILER


def macros(*flags: str) -> set[str]:
    command = [*(building.compiler() or ()), *flags, "-dM", "-E", "-x", "c", "/dev/null"]
    return set(re.findall(r"#define (\w+)", subprocess.run(command, capture_output=True, text=True).stdout))


def test_the_levels_distinguish_what_the_sources_distinguish() -> None:
    sources = "\n".join((building.HERE / name).read_text() for name in building.SOURCES)
    used = set(re.findall(r"__(?:AVX|AMX|FMA|F16C|SSE|BMI)\w*__", sources))
    defined = {frozenset(macros(*level.flags) & used) for level in building.LEVELS}
    assert used == frozenset.union(*defined) and len(defined) == len(building.LEVELS)
