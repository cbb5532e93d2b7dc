"""The levels of CPUs: which ones a CPU has, what FOREDRAFT_CPU_LEVEL makes of them, and what people are told. Of the
kernels that a wheel carries, the best level that the CPU has is loaded, if it is whole and of these sources."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft import ConfigError, kernels
from foredraft.kernels import building, compilation
from foredraft.model.runner import shape_cache
from foredraft.profiling import profile
from tests.support.compiling import QUICK, copying_compiler

X86, ARM = (building.SYSTEMS[name].levels for name in ("linux-x86_64", "linux-aarch64"))

GRAVITON_2 = "Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
M1 = """hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_LSE: 1
hw.optional.arm.FEAT_RDM: 1
hw.optional.arm.FEAT_I8MM: 0
hw.optional.arm.FEAT_BF16: 0
machdep.cpu.brand_string: Apple M1"""
INTEL_MAC = """hw.optional.avx2_0: 1
machdep.cpu.brand_string: Intel(R) Core(TM) i7-8700B CPU @ 3.20GHz
machdep.cpu.features: FPU VME SSE SSE2 SSE3 SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE POPCNT AES XSAVE OSXSAVE AVX1.0 F16C
machdep.cpu.leaf7_features: RDWRFSGSBASE BMI1 AVX2 SMEP BMI2 ERMS
machdep.cpu.extfeatures: SYSCALL XD 1GBPAGE EM64T LAHF LZCNT PREFETCHW RDTSCP TSCI"""
SYSTEMS = {
    "no /proc": (ARM, "", ["arm64"]),
    "Cortex-A72": (ARM, "Features\t: fp asimd evtstrm crc32 cpuid", ["arm64"]),
    "Graviton 2": (ARM, GRAVITON_2, ["arm64-dotprod", "arm64"]),
    "Graviton 3": (ARM, GRAVITON_2 + " i8mm bf16", ["arm64-i8mm", "arm64-dotprod", "arm64"]),
    "M1": (ARM, M1, ["arm64-dotprod", "arm64"]),
    "M2": (ARM, M1.replace("I8MM: 0", "I8MM: 1").replace("BF16: 0", "BF16: 1"), ["arm64-i8mm", "arm64-dotprod", "arm64"]),
    "Intel Mac": (X86, INTEL_MAC, ["x86-64-v3"]),
    "Intel Mac without FMA": (X86, INTEL_MAC.replace(" FMA", ""), []),
}  # fmt: skip


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> str:
    """Pretend that this CPU has all levels of x86-64 but the best, and return the best that it has."""
    monkeypatch.delenv(compilation.VARIABLE, raising=False)
    monkeypatch.setattr(building, "LEVELS", X86)
    monkeypatch.setattr(compilation, "cpu_features", lambda: X86[1].needs)
    return X86[1].name


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[building.Level]:
    """Pretend that a compiler builds each library, and return a list of the levels that it builds."""
    built: list[building.Level] = []
    monkeypatch.setattr(compilation, "find_shipped", lambda: None)
    monkeypatch.setattr(building, "compiler", lambda: ["cc"])
    monkeypatch.setattr(building, "accepts", lambda command, flags: True)
    monkeypatch.setattr(compilation, "_compiled", lambda command, level: built.append(level) or "built")
    start_anew(monkeypatch)
    return built


def start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process has loaded no kernels."""
    fresh = compilation.functools.cache(compilation._loaded.__wrapped__)
    monkeypatch.setattr(compilation, "_loaded", fresh)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_levels_follow_what_the_system_tells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    levels, text, want = SYSTEMS[name]
    monkeypatch.setattr(building, "LEVELS", levels)
    monkeypatch.setattr(compilation, "_system_lines", text.splitlines)
    assert [level.name for level in compilation.cpu_levels()] == want


@pytest.mark.parametrize("value", ["x86-64-v4-amx", "arm64", "avx2"])
def test_a_level_of_another_cpu_is_refused(value: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compilation.VARIABLE, value)
    for ask in (compilation.find_shipped, compilation.describe_cpu):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == (
            f"the environment variable FOREDRAFT_CPU_LEVEL is {value!r}, which is no level of this CPU; give one"
            " of x86-64-v4-bf16, x86-64-v4-vnni, x86-64-v4, x86-64-v3, native, or unset it"
        )


@pytest.mark.parametrize("value", ["", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3"])
def test_the_named_level_is_compiled(
    value: str, second: str, compiled: list[building.Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compilation.VARIABLE, value)
    assert compilation.library() == "built"
    assert [level.name for level in compiled] == [compilation.level_in_use()] == [value or second]


def test_a_level_that_the_compiler_does_not_know_is_passed_over_unless_it_is_named(
    second: str, compiled: list[building.Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "accepts", lambda command, flags: "-mavx512bf16" not in flags)
    assert compilation.level_in_use() == "x86-64-v4-vnni"
    assert compilation.describe_level() == (
        "x86-64-v4-vnni; this CPU has x86-64-v4-bf16, too, which may be faster: a newer C compiler or the wheel has it"
    )
    compilation._loaded.cache_clear()
    monkeypatch.setenv(compilation.VARIABLE, second)
    compilation.library()
    assert compiled[-1].name == second, "the compiler then says what it does not know"


def test_people_are_told_what_the_cpu_lacks_and_how_to_get_a_better_level(
    second: str, compiled: list[building.Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compilation.describe_level() == "x86-64-v4-bf16; this CPU has no AMX"
    monkeypatch.setenv(compilation.VARIABLE, "x86-64-v3")
    compilation._loaded.cache_clear()
    assert compilation.describe_level() == (
        "x86-64-v3; this CPU has x86-64-v4-bf16, too, which may be faster: unset FOREDRAFT_CPU_LEVEL"
    )


def test_no_result_of_one_level_is_found_at_another(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = []
    for value in ("", "x86-64-v4", "x86-64-v3"):
        monkeypatch.setenv(compilation.VARIABLE, value)
        cpus.append(tuple(compilation.describe_cpu()))
    assert len({*cpus}) == 3
    keys = [compilation._cache_key(["cc"], level) for level in X86[:2]] if building.compiler() else [{}, None]
    assert keys[0] != keys[1]
    for module in (shape_cache, profile):
        assert module.describe_cpu is compilation.describe_cpu


def test_the_sources_are_all_files_of_the_folder() -> None:
    found = {path.name for path in Path(building.__file__).parent.iterdir() if path.suffix in (".c", ".inc")}
    assert {*building.SOURCES} == found and building.SOURCES[0] == "kernels.c"


# --- the kernels that a wheel carries ---------------------------------------------------------------------

CARRIES = building.this_system() if building.LEVELS == X86 else None
NO_COMPILER = " and no C compiler was found (CC may name one)"
BEST, SECOND, THIRD, *_, LEAST = (level.name for level in X86)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return libraries of all levels, which hold the code of the least one."""
    if CARRIES is None or building.compiler() is None or kernels.library() is None:
        pytest.skip("no C compiler, or not Linux on x86-64")
    folder = tmp_path_factory.mktemp("made")
    compiler = copying_compiler(tmp_path_factory.mktemp("compiler"), X86[-1].flags)
    building.build_levels(folder, CARRIES, [str(compiler)])
    return folder


@pytest.fixture
def installed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the libraries of an installation on a CPU of the best level, in a process that starts now."""
    folder = tmp_path / "libraries"
    shutil.copytree(made, folder)
    monkeypatch.setattr(building, "LIBRARIES", folder)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "compiler", lambda: None)
    start_anew(monkeypatch)
    pretend(monkeypatch, BEST)
    return folder


def pretend(monkeypatch: pytest.MonkeyPatch, level: str | None, *missing: str) -> None:
    found = {each.name: each.needs for each in X86}.get(level or "", frozenset())
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
    compilation._loaded.cache_clear()
    (installed / f"{level}.so").unlink()
    assert loaded(installed) is None


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
    compilation._loaded.cache_clear()
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


@pytest.mark.usefixtures("made")
def test_the_levels_distinguish_what_the_sources_distinguish() -> None:
    sources = "\n".join((building.HERE / name).read_text() for name in building.SOURCES)
    used = set(re.findall(r"__(?:AVX|AMX|FMA|F16C|SSE|BMI)\w*__", sources))
    defined = {frozenset(macros(*level.flags) & used) for level in building.LEVELS}
    assert used == frozenset.union(*defined) and len(defined) == len(building.LEVELS)
