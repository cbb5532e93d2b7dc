"""The pool of threads: the same bits whatever its threads do; threads that stall, sleep, fork or come late. And C
programs around the kernels under sanitisers: they stay within their buffers and free their memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.kernels import building, pool
from foredraft.model.runner import Runner
from tests.support.compiling import QUICK, compile_anew, plant
from tests.unit.test_kernels_passes import decoders, text_logits

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")

TESTS = Path(__file__).parents[1]
PROGRAM, STALLS, MEMORY = (TESTS / name for name in ("pool.c", "pool_stalls.h", "kernels_memory.c"))
SANITISERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-O1", "-g", "-pthread", f"-I{TESTS}")
TRIES = 8  # of a planted defect: stalls are random
# Seconds until a program counts as one that does not end, and those with a planted defect; they end within one.
PATIENCE, LITTLE_PATIENCE = 60, 12
# (name: old source, new source) of pool.inc
DEFECTS = {
    "a piece committed twice": ("if (w->claimed) STALL(IN_COMMIT);\n    return w->claimed;", "return w->claimed = 1;"),
    "a piece committed before it is written": ("&open, COMMITTING,", "&open, COMMITTED,"),
    "a piece that writes at once computed again": ("turn <= w->threads && !w->direct;", "turn <= w->threads;"),
    "a counter not reset": ("memset(job->lines, 0, job->written * sizeof(Line));", ""),
    "a job cleared under a late thread": (
        "if (atomic_fetch_sub_explicit(&job->inside, 1, memory_order_acq_rel) != 1) return 1;\n"
        "    memset(job->lines, 0, job->written * sizeof(Line));",
        "memset(job->lines, 0, job->written * sizeof(Line));\n"
        "    if (atomic_fetch_sub_explicit(&job->inside, 1, memory_order_acq_rel) != 1) return 1;",
    ),
    "a piece left out at the end": ("(units + w->size - 1) / w->size;", "units / w->size;"),
    "pieces that belong to no thread": ("return w->pieces * seat / w->threads;", "return w->pieces / w->threads * seat;"),
    "an operation left before its results are there": ("!= COMMITTED) return 0;", "== OPEN) return 0;"),
    "a lost wake-up": ("sleep_until_posted(seen);\n    atomic", "sleep_until_posted(atomic_load(&pool.posted));\n    atomic"),
    "threads that never sleep": ("if (now() - start > SPIN) break;", ""),
    "threads of the parent in a forked process": ("pthread_atfork(NULL, NULL, forget_threads);", ""),
}  # fmt: skip


def compiled(folder: Path, *flags: str, source: Path = PROGRAM) -> Path:
    program = folder / "program"
    command = [*(building.compiler() or ()), *FLAGS, *flags, str(source), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(program: Path, patience: float = PATIENCE) -> tuple[int, str]:
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return 1, "it does not end"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.heavy
def test_results_do_not_depend_on_what_the_threads_do(tmp_path: Path) -> None:
    program = compiled(tmp_path, f"-I{building.HERE}", "-DFORKS")
    for _ in range(5):
        code, said = run(program)
        assert code == 0, said


def test_the_thread_sanitiser_finds_nothing(tmp_path: Path) -> None:
    try:
        program = compiled(tmp_path, f"-I{building.HERE}", "-fsanitize=thread")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no thread sanitiser")
    code, said = run(program)
    if "unexpected memory mapping" in said:
        pytest.skip("this system's memory layout is none that the thread sanitiser knows")
    assert code == 0, said


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, tmp_path: Path) -> None:
    shutil.copy(building.HERE / "pool.inc", tmp_path)
    source, (old, new) = (tmp_path / "pool.inc").read_text(), DEFECTS[name]
    assert source.count(old) == 1, f"the pool no longer holds {old!r} once"
    (tmp_path / "pool.inc").write_text(source.replace(old, new))
    program = compiled(tmp_path, f"-I{tmp_path}", "-DFORKS", "-DPATIENCE=4")
    assert any(run(program, LITTLE_PATIENCE)[0] for _ in range(TRIES))


def logits_by(threads: int, runner: Runner, lengths: tuple[int, ...] = (80, 3, 1, 7)) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return text_logits(runner, lengths)
    finally:
        torch.set_num_threads(before)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_of_threads_that_stall_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_anew(monkeypatch, tmp_path, QUICK, "-include", str(STALLS), "-DODDS=100")
    runner = Runner(decoders("gemma3", dtype)[0])
    wanted = logits_by(1, runner)
    for threads in (2, 3, 8) * 10:
        assert torch.equal(logits_by(threads, runner), wanted)


@pytest.mark.heavy
def test_results_without_a_commit_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loop = "for (int64_t unit = p.from; unit < p.to; unit++) {"
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-include", str(STALLS), "-DODDS=30"))
    old, new = f"if (!commits(w)) continue;\n        {loop}", f"commits(w);\n        {loop}"
    plant(monkeypatch, tmp_path, old, new)
    runner = Runner(decoders("gemma3", torch.float32)[0])
    wanted = logits_by(1, runner)
    assert not all(torch.equal(logits_by(8, runner), wanted) for _ in range(50))


def test_several_threads_of_python_compute_at_once() -> None:
    runners = [Runner(decoders(family, torch.float32)[0]) for family in ("llama", "gemma3", "qwen3")]
    wanted = [logits_by(1, runner, (40, 3)) for runner in runners]
    wrong = []

    def compute(index: int) -> None:
        torch.set_num_threads(2 + index)  # of this thread
        for _ in range(20):
            if not torch.equal(text_logits(runners[index], (40, 3)), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=compute, args=(index,)) for index in range(len(runners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_live_until_no_thread_is_late() -> None:
    pool.settle()
    kept = torch.zeros(3)
    pool.keep(kept)
    assert any(held is kept for used in pool._kept for held in used)
    pool.settle()
    assert not pool._kept


# the widest tiles of this CPU, and the portable code
@pytest.mark.heavy
@pytest.mark.parametrize("cpu", ["-march=native", pytest.param("-march=x86-64", marks=pytest.mark.slow)])
def test_the_sanitisers_of_memory_find_nothing(cpu: str, tmp_path: Path) -> None:
    if cpu == "-march=x86-64" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("every CPU of this kind compiles the same")
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    try:
        compiled(tmp_path, *SANITISERS, source=tmp_path / "empty.c")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no sanitisers")
    flags = (*SANITISERS, "-O0", "-Wno-psabi", f"-I{building.HERE}", cpu)
    program = compiled(tmp_path, *flags, source=MEMORY)
    # The OpenMP library keeps memory until the process ends; leaks of the kernels are counted by the program.
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run([program], capture_output=True, text=True, env=options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
