"""The kernels that a wheel carries: the best level that the CPU has is loaded, if it is whole and of these sources."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft import kernels
from foredraft.kernels import building, compilation, machine, shipped
from tests.support.compiling import QUICK

pytestmark = pytest.mark.skipif(
    not building.has_levels() or building.compiler() is None or kernels.library() is None,
    reason="no C compiler, or not Linux on x86-64",
)

BEST, SECOND, THIRD, LEAST = (level.name for level in building.LEVELS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "FLAGS", (*building.FLAGS, QUICK))
        building.build_levels(building.compiler() or [], folder)
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
    """Give the CPU the flags of a level, except those that are missing."""
    found = {each.name: each.needs for each in building.LEVELS}.get(level or "", frozenset())
    monkeypatch.setattr(shipped, "cpu_flags", lambda: found - {*missing})


def loaded(folder: Path) -> str | None:
    """Return the level of the library that is loaded; None where none of the folder is."""
    library = compilation.library()
    return None if library is None else Path(library._name).relative_to(folder).stem


def test_a_compiled_level_is_of_all_files_that_it_needs(made: Path) -> None:
    names = {f"{level.name}.so" for level in building.LEVELS} | {building.MANIFEST}
    assert {path.name for path in made.iterdir()} == names


@pytest.mark.parametrize(
    ("level", "missing", "chosen"),
    [
        (BEST, (), BEST),
        (SECOND, (), SECOND),
        (THIRD, (), THIRD),
        (LEAST, (), LEAST),
        (BEST, ("avx512vl",), LEAST),
        (BEST, ("fma",), None),
        (None, (), None),
    ],
)
def test_the_best_level_that_the_cpu_has_is_loaded(
    level: str | None, missing: tuple[str, ...], chosen: str | None, installed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pretend(monkeypatch, level, *missing)
    assert loaded(installed) == chosen


def test_this_cpu_has_the_levels_that_its_flags_say() -> None:
    flags = machine.cpu_flags()
    assert {"fpu", "sse2"} <= flags
    assert shipped._fitting() == [level.name for level in building.LEVELS if level.needs <= flags]


@pytest.mark.parametrize("change", [lambda b: b[: len(b) // 2], lambda b: b + b"more", lambda b: b""])
def test_a_damaged_library_is_named_and_another_is_loaded(
    change: Callable[[bytes], bytes], installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = installed / f"{BEST}.so"
    damaged.write_bytes(change(damaged.read_bytes()))
    with caplog.at_level("WARNING"):
        assert loaded(installed) == SECOND
    [told] = [record.getMessage() for record in caplog.records]
    assert told == f"{damaged} is damaged and is not used; install foredraft again"


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"sources": 3, "libraries": {}}', None])
def test_libraries_without_their_manifest_are_not_loaded(manifest: str | None, installed: Path) -> None:
    (installed / building.MANIFEST).unlink()
    if manifest is not None:
        (installed / building.MANIFEST).write_text(manifest)
    assert loaded(installed) is None
    assert compilation.unavailable_because() == (
        "the kernels that this installation carries are damaged or of another version,"
        " and no C compiler was found (CC may name one)"
    )


def test_libraries_of_other_sources_are_not_loaded(installed: Path) -> None:
    manifest = installed / building.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sources": "0" * 64}))
    assert loaded(installed) is None


def test_a_library_that_cannot_be_loaded_is_compiled_instead(
    installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = installed / building.MANIFEST
    content = json.loads(made.read_text())
    (installed / f"{BEST}.so").write_bytes(b"for another system")
    content["libraries"][BEST] = shipped._digest_of(installed / f"{BEST}.so")
    made.write_text(json.dumps(content))
    assert compilation.library() is None, "there is no compiler"
    assert "cannot be loaded" in caplog.text
    monkeypatch.setattr(building, "compiler", lambda: ["cc"])
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, QUICK))
    compilation._library_or_reason.cache_clear()
    assert compilation.library() is not None


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        ("none", "this installation carries no kernels, and no C compiler was found (CC may name one)"),
        (
            "old",
            "this installation carries no kernels for this CPU, and no C compiler was found (CC may name one)",
        ),
    ],
)
def test_the_reason_names_what_is_missing(
    system: str, reason: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if system == "none":
        shutil.rmtree(installed)
    pretend(monkeypatch, None)
    assert compilation.unavailable_because() == reason


def macros(*flags: str) -> set[str]:
    command = [*(building.compiler() or ()), *flags, "-dM", "-E", "-x", "c", "/dev/null"]
    return set(re.findall(r"#define (\w+)", subprocess.run(command, capture_output=True, text=True).stdout))


def test_the_levels_distinguish_what_the_sources_distinguish() -> None:
    sources = "\n".join((building.HERE / name).read_text() for name in building.SOURCES)
    used = set(re.findall(r"__(?:AVX|AMX|FMA|F16C|SSE|BMI)\w*__", sources))
    defined = {frozenset(macros(*level.flags) & used) for level in building.LEVELS}
    assert used == max(defined, key=len) and len(defined) == len(building.LEVELS)
