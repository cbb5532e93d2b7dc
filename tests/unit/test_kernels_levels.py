"""The levels of CPUs: which ones a CPU has, what FOREDRAFT_CPU_LEVEL makes of them, and what people are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import ConfigError
from foredraft.kernels import building, compilation
from foredraft.model.runner import shape_cache
from foredraft.profiling import profile

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
    fresh = compilation.functools.cache(compilation._library_or_reason.__wrapped__)
    monkeypatch.setattr(compilation, "_library_or_reason", fresh)
    return built


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
    compilation._library_or_reason.cache_clear()
    monkeypatch.setenv(compilation.VARIABLE, second)
    compilation.library()
    assert compiled[-1].name == second, "the compiler then says what it does not know"


def test_people_are_told_what_the_cpu_lacks_and_how_to_get_a_better_level(
    second: str, compiled: list[building.Level], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compilation.describe_level() == "x86-64-v4-bf16; this CPU has no AMX"
    monkeypatch.setenv(compilation.VARIABLE, "x86-64-v3")
    compilation._library_or_reason.cache_clear()
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
