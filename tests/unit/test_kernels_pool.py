"""The pool of threads: the same bits whatever its threads do; threads that stall, sleep, fork or come late. And C
programs around the kernels under sanitisers: they stay within their buffers and free their memory. And huge pages:
when memory is mapped, committed and freed, and ordinary memory where the system has none."""

from __future__ import annotations

import gc
import mmap
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft import kernels
from foredraft.kernels import building, pool
from foredraft.kernels.pool import CACHE_LINE, HUGE_PAGE, REGION, Arena, as_fast_as_arena
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeLinear
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
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


# --- huge pages -------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def flags_of(tensor: torch.Tensor) -> list[str]:
    """Return the flags of the mapping that holds a tensor's first byte."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapping[1], 16) <= tensor.data_ptr() < int(mapping[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7, 300_001)])
def test_zeros_are_contiguous_and_writable(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = pool.zeros(shape, dtype)
    assert (made.shape, made.dtype) == (shape, dtype)
    assert made.is_contiguous() and not made.any() and made.fill_(3).eq(3).all()
    assert pool.zeros(shape, dtype, torch.device("meta")).is_meta


@linux
def test_large_tensors_are_huge_page_mappings() -> None:
    """The test fails without madvise, and without the alignment."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no huge pages")
    made = pool.zeros((HUGE_PAGE + 1,), torch.uint8)
    assert made.data_ptr() % HUGE_PAGE == 0
    assert "hg" in flags_of(made)


COMMITS = """
import re, torch
from foredraft.kernels import pool
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
small = pool.zeros((2**22,), torch.uint8)
before = status("RssAnon"), status("VmSize")
made = pool.zeros((2**20, 256), torch.float32)
assert status("RssAnon") - before[0] < 2**20, "no page is touched yet"
made[2**19] = 1
assert status("RssAnon") - before[0] < 2**20 + pool.HUGE_PAGE, "one page is committed"
del made
assert status("RssAnon") - before[0] < 2**20
assert status("VmSize") - before[1] < 2**26, "all memory is freed"
"""


@pytest.mark.heavy
@linux
def test_memory_is_committed_when_touched_and_freed_with_the_tensor() -> None:
    """The test needs a process of its own, for a gigabyte. It fails on memory that is filled or never freed."""
    ran = subprocess.run([sys.executable, "-c", COMMITS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("missing", ["refused by the system", "another system"])
def test_without_huge_pages_the_memory_is_ordinary(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "refused by the system":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not pool.zeros((HUGE_PAGE,), torch.bfloat16).any()
    assert (Arena().empty((3, 4), torch.float32).fill_(1) == 1).all()


def test_tensors_of_an_arena_do_not_overlap() -> None:
    arena = Arena()
    shapes = [(3,), (7, 5), (REGION // 8 - 1, 3), (2,), (REGION,), (33, 2), (1, 1)]
    made = [arena.empty(shape, torch.bfloat16).fill_(index) for index, shape in enumerate(shapes)]
    assert [tensor.shape for tensor in made] == shapes
    for index, tensor in enumerate(made):
        assert tensor.data_ptr() % CACHE_LINE == 0 and (tensor == index).all()


@linux
def test_a_file_is_as_fast_as_an_arena_if_the_system_maps_it_in_huge_pages(tmp_path: Path) -> None:
    def huge() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("FilePmdMapped:"))

    before, size = huge(), 8 * HUGE_PAGE
    (tmp_path / "file").write_bytes(bytes(size))
    mapped = torch.from_file(str(tmp_path / "file"), size=size, dtype=torch.uint8)
    assert as_fast_as_arena([*mapped.split(HUGE_PAGE)]) == (huge() - before > size / 2)
    assert not as_fast_as_arena([torch.zeros(size, dtype=torch.uint8)])


@linux
def test_weights_and_cache_use_huge_pages_and_free_them(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    decoder = load_decoder(folder, native=True)
    cache = Runner(decoder).new_cache(8, 4000)
    products = [layer.mlp.down for layer in decoder.layers] + [decoder.output]
    for product in products:
        assert isinstance(product, NativeLinear)
        assert "hg" in flags_of(product.weight)
    assert "hg" in flags_of(cache.data)
    size, held = status("VmSize"), REGION + cache.data.nbytes
    del decoder, products, product, cache
    gc.collect()
    assert status("VmSize") <= size - held
