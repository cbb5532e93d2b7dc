"""Memory in huge pages: asked for, committed when it is touched, given back; ordinary memory where there are none."""

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
from foredraft.kernels import huge_pages
from foredraft.kernels.huge_pages import HUGE, LINE, REGION, Arena
from foredraft.model.runner import Runner
from foredraft.model.runner.native.linear import NativeLinear
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def status(key: str) -> int:
    """Bytes, of this process."""
    found = re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def flags_of(tensor: torch.Tensor) -> list[str]:
    """What the kernel knows of the mapping that a tensor begins in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapping[1], 16) <= tensor.data_ptr() < int(mapping[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no mapping")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (7, 300_001)])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = huge_pages.zeros(shape, dtype)
    assert (made.shape, made.dtype) == (shape, dtype)
    assert made.is_contiguous()
    assert not made.any()
    made.fill_(3)
    assert (made == 3).all()
    assert huge_pages.zeros(shape, dtype, torch.device("meta")).is_meta


@linux
def test_they_are_asked_for() -> None:
    """Seen to fail without the advice, and without the alignment."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has none")
    made = huge_pages.zeros((HUGE + 1,), torch.uint8)
    assert made.data_ptr() % HUGE == 0
    assert "hg" in flags_of(made)


COMMITS = """
import re, torch
from foredraft.kernels import pages
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
small = huge_pages.zeros((2**22,), torch.uint8)
before = status("RssAnon"), status("VmSize")
made = huge_pages.zeros((2**20, 256), torch.float32)
assert status("RssAnon") - before[0] < 2**20, "nothing is touched yet"
made[2**19] = 1
assert status("RssAnon") - before[0] < 2**20 + huge_pages.HUGE, "one page is"
del made
assert status("RssAnon") - before[0] < 2**20
assert status("VmSize") - before[1] < 2**26, "and all of it is given back"
"""


@linux
def test_nothing_is_committed_before_it_is_touched() -> None:
    """In a process of its own: a gigabyte. Seen to fail on memory that is filled, and on memory that is kept."""
    ran = subprocess.run([sys.executable, "-c", COMMITS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("lacking", ["the kernel", "the system"])
def test_without_them(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "the kernel":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # refused
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    made = huge_pages.zeros((HUGE,), torch.bfloat16)
    assert not made.any()
    arena = Arena()
    assert (arena.empty((3, 4), torch.float32).fill_(1) == 1).all()


def test_an_arenas_tensors_lie_apart() -> None:
    arena = Arena()
    shapes = [(3,), (7, 5), (REGION // 8 - 1, 3), (2,), (REGION,), (33, 2), (1, 1)]
    made = [arena.empty(shape, torch.bfloat16) for shape in shapes]
    for index, tensor in enumerate(made):
        assert tensor.data_ptr() % LINE == 0
        tensor.fill_(index)
    for index, (tensor, shape) in enumerate(zip(made, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == index).all()


@linux
@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_a_models_weights_and_cache_lie_in_them_and_go_with_them(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    decoder = load_decoder(folder, native=True)
    cache = Runner(decoder).new_cache(8, 4000)
    products = [layer.mlp.down for layer in decoder.layers] + [decoder.output]
    for product in products:
        assert isinstance(product, NativeLinear)
        assert "hg" in flags_of(product.weight)
    assert "hg" in flags_of(cache.memory)
    size, held = status("VmSize"), REGION + cache.memory.nbytes
    del decoder, products, product, cache
    gc.collect()
    assert status("VmSize") <= size - held
