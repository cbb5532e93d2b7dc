"""The kernels stay within their buffers and free their memory: a C program around them, under sanitisers."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from foredraft import kernels
from foredraft.kernels import building

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

PROGRAM = Path(__file__).parents[1] / "kernels_memory.c"
SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-O0", "-g", "-pthread", "-Wno-psabi", f"-I{building.HERE}")
# the widest tiles of this CPU, and the portable code
CPUS = ("-march=native", pytest.param("-march=x86-64", marks=pytest.mark.slow))


def compiled(source: Path, program: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*(building.compiler() or ()), *flags, str(source), "-o", str(program), "-lm"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.heavy
@pytest.mark.parametrize("cpu", CPUS)
def test_the_sanitisers_find_nothing(cpu: str, tmp_path: Path) -> None:
    if cpu == "-march=x86-64" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("every CPU of this kind compiles the same")
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    if compiled(empty, tmp_path / "empty", *SANITISERS).returncode:
        pytest.skip("the compiler has no sanitisers")
    made = compiled(PROGRAM, tmp_path / "program", *SANITISERS, *FLAGS, cpu)
    assert made.returncode == 0, made.stderr
    # The OpenMP library keeps memory until the process ends; leaks of the kernels are counted by the program.
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run([tmp_path / "program"], capture_output=True, text=True, env=options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
