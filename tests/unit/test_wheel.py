"""The wheel carries compiled kernels where it is built with a compiler, and they serve where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from foredraft.kernels import building
from foredraft.kernels.compilation import cpu_features
from tests.support.running import ROOT, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not building.LEVELS or building.compiler() is None, reason="no C compiler, or not Linux on x86-64"
    ),
]
LIBRARIES = {f"foredraft/kernels/libraries/{level.name}.so" for level in building.LEVELS}
MAX_BYTES = 2**20  # of the compressed libraries: a fortieth of the wheel


def without_compiler() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    return kept | {"PATH": "/nonexistent", "HF_HUB_OFFLINE": "1", "FOREDRAFT_CACHE": ""}


def build(folder: Path, target: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, encoding="utf-8", timeout=840)


def built(folder: Path, target: str, env: dict[str, str] | None = None) -> tuple[Path, str]:
    done = build(folder, target, env or environment())
    assert done.returncode == 0, done.stderr
    [file] = folder.iterdir()
    return file, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"), "wheel")[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def test_a_wheel_with_kernels_is_for_one_platform_and_little_larger(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as opened:
        sizes = {info.filename: info.compress_size for info in opened.infolist()}
    assert sizes.keys() >= LIBRARIES
    assert sum(sizes[name] for name in LIBRARIES) < MAX_BYTES


# Decodes on a CPU that has one level and no better one.
PROGRAM = """
import sys
import foredraft
from foredraft.kernels import building, compilation

assert building.compiler() is None
[level] = [level for level in building.LEVELS if level.name == sys.argv[1]]
compilation.cpu_features = lambda: level.needs
assert compilation.library()._name.endswith(f"libraries/{level.name}.so")
greedy = foredraft.SamplingParams(max_new_tokens=32, temperature=0.0)
outputs = [
    foredraft.load(drafter=drafter, kernels=True).generate("def f(n): return n; def f(n):", greedy)[0]
    for drafter in ("none", "lookup")
]
assert outputs[0].token_ids == outputs[1].token_ids and outputs[1].stats.drafted
print(level.name)
"""


@pytest.mark.parametrize("level", building.LEVELS, ids=lambda level: level.name)
def test_the_kernels_of_each_level_decode_without_a_compiler(level: building.Level, installed: Path) -> None:
    if not level.needs <= cpu_features():
        pytest.skip("this CPU lacks the level")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level.name], capture_output=True, encoding="utf-8", timeout=240,
        env=without_compiler() | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [level.name]


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (without_compiler(), "carries no compiled kernels: there is no C compiler."),
        (environment(CC="false"), "compiling them failed"),
    ],
    ids=["none", "one that fails"],
)
def test_a_wheel_without_compiled_kernels_says_so(env: dict[str, str], reason: str, tmp_path: Path) -> None:
    file, said = built(tmp_path, "wheel", env)
    assert file.name.endswith("-py3-none-any.whl") and reason in said
    with zipfile.ZipFile(file) as opened:
        assert not [name for name in opened.namelist() if "kernels/libraries" in name]
        assert "foredraft/kernels/kernels.c" in opened.namelist()


@pytest.mark.timeout(900)  # optimised three times over
def test_a_wheel_for_another_system_carries_its_levels(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    system = building.SYSTEMS["macos-arm64"]
    file, _ = built(tmp_path, "wheel", environment(FOREDRAFT_WHEEL_TARGET="macos-arm64"))
    assert file.name.endswith(f"-py3-none-{system.tag}.whl")
    with zipfile.ZipFile(file) as opened:
        names = [name for name in opened.namelist() if "kernels/libraries/" in name]
        heads = {opened.read(name)[:8] for name in names if name.endswith(system.suffix)}
    assert {Path(name).name for name in names} == {
        building.MANIFEST,
        *(f"{level.name}{system.suffix}" for level in system.levels),
    }
    assert heads == {bytes.fromhex("cffaedfe 0c000001")}, "of Mach-O files for ARM64"


def test_an_unknown_system_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path, "wheel", environment(FOREDRAFT_WHEEL_TARGET="amiga"))
    assert done.returncode != 0
    assert "FOREDRAFT_WHEEL_TARGET is 'amiga'; give one of linux-x86_64, " in done.stderr


def test_the_source_archive_can_build_the_wheel(tmp_path: Path) -> None:
    file, _ = built(tmp_path, "sdist")
    with tarfile.open(file) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"hatch_build.py", "pyproject.toml", "src/foredraft/kernels/building.py"} <= names
