"""Huge pages: when memory is mapped, committed and freed, and ordinary memory where the system has none."""

from __future__ import annotations

import gc
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foredraft import kernels
from foredraft.kernels import pool
from foredraft.kernels.pool import CACHE_LINE, HUGE_PAGE, REGION, Arena, as_fast_as_arena
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeLinear
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

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
@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
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
