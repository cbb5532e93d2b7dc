"""Loading holds the weights once in the host's anonymous memory, sampled in a separate process.

Pages of mapped files do not count, because the kernel can drop them at any time. Seen to fail on: a new copy of each
fused weight, the embedding loaded before the layers, and what the tests below plant.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foredraft.model.cache import KVCache
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import save_checkpoint

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4}
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "initializer_range": 0.02}
MEASURE = """
import ctypes, gc, json, pathlib, re, sys, threading
import torch
from foredraft import loading
from foredraft.model import checkpoint, weights

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

loader, warm, folder, device, dtype, defect = sys.argv[1:]
torch.set_num_threads(1)

def load(path):
    if loader == "decoder":
        return weights.load_decoder(pathlib.Path(path), device, getattr(torch, dtype))
    return loading.load(path, device=device, dtype=dtype, max_batch=1, max_length=512, drafter="none")  # what measuring costs touches is no weight

load(warm)
if defect == "twice":
    view, kept = checkpoint.CheckpointTensors.view, []
    def keeping(self, *args):
        kept.append(view(self, *args).clone())
        return kept[-1]
    checkpoint.CheckpointTensors.view = keeping
if defect == "late":
    def probe_late(found, device, options, *, deterministic):
        decoder = weights.load_decoder(found.source, device, found.dtype)
        return loading.runners.Runner(decoder, deterministic=deterministic)
    loading.runners.make_runner = probe_late
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # otherwise the load would first reuse memory that the warm-up freed
before, samples, done = anonymous(), [], threading.Event()

def sample():
    while not done.wait(0.001):
        samples.append(anonymous())

thread = threading.Thread(target=sample)
thread.start()
loaded = load(folder)
done.set()
thread.join()
print(json.dumps([max(samples, default=before) - before, anonymous() - before]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("checkpoints")
    yield made
    shutil.rmtree(made)  # a gigabyte


def checkpoint(folder: Path, dtype: str = "float32", tied: bool = False, shards: bool = True) -> Path:
    made = folder / f"{dtype}-{tied}-{shards}"
    if not made.exists():
        keys = {**SIZES, **HEADS, "vocab_size": 16000, "tie_word_embeddings": tied}
        save_checkpoint(made, dtype=getattr(torch, dtype), shards=shards, **keys)
        save_checkpoint(made / "tiny")
        save_checkpoint(made / "shallow", dtype=getattr(torch, dtype), **{**keys, "num_hidden_layers": 1})
    return made


def measured(
    made: Path, device: str, dtype: str, loader: str = "decoder", defect: str = "none"
) -> tuple[float, float, float, float]:
    """Measure one load in a new process.

    A load of the whole model warms up with one layer of the same sizes, because oneDNN keeps kernels of about
    12 MiB for each shape of a weight. Returns, in bytes: the peak of additional memory, the additional memory
    afterwards (of a whole model both without its KV cache), the size of the weights, and how much may be held.
    """
    warm = made / ("tiny" if loader == "decoder" else "shallow")
    command = [sys.executable, "-c", MEASURE, loader, str(warm), str(made), device, dtype, defect]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    peak, after = json.loads(ran.stdout)
    spec, width = ModelSpec.from_folder(made), getattr(torch, dtype)
    cache = 0 if loader == "decoder" else KVCache.bytes_per_row(spec, 512, width)
    embedding = spec.vocab_size * spec.hidden_size
    attention = spec.hidden_size * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    weights = spec.layers * (attention + mlp) + embedding * (1 if spec.tied else 2)
    limit = 1.1 * weights + embedding * spec.tied
    return peak - cache, after - cache, weights * width.itemsize, limit * width.itemsize


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("stored", "tied", "shards", "dtype"),
    [
        ("bfloat16", True, False, "bfloat16"),
        ("float32", False, True, "bfloat16"),
        pytest.param("bfloat16", False, True, "bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", True, True, "float32", marks=pytest.mark.slow),
        pytest.param("float32", False, False, "float32", marks=pytest.mark.slow),
        pytest.param("float32", True, True, "float16", marks=pytest.mark.slow),
    ],
)
def test_the_host_holds_the_weights_once(
    folder: Path, stored: str, tied: bool, shards: bool, dtype: str
) -> None:
    peak, after, weights, limit = measured(checkpoint(folder, stored, tied, shards), "cpu", dtype)
    assert 0.9 * weights < after <= limit
    assert peak <= limit


def test_weights_kept_twice_are_noticed(folder: Path) -> None:
    peak, after, _, limit = measured(checkpoint(folder), "cpu", "bfloat16", defect="twice")
    assert min(peak, after) > limit


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_host_holds_nothing_of_a_model_on_another_device(folder: Path, dtype: str) -> None:
    """The meta device stands for an accelerator."""
    peak, after, weights, _ = measured(checkpoint(folder), "meta", dtype)
    assert max(peak, after) < 0.05 * weights


@pytest.mark.parametrize(
    ("dtype", "tied", "shards"),
    [
        ("bfloat16", True, False),
        ("float32", False, True),
        pytest.param("bfloat16", False, True, marks=pytest.mark.slow),
        pytest.param("float32", True, True, marks=pytest.mark.slow),
    ],
)
def test_loading_a_model_holds_the_weights_once_and_the_cache(
    folder: Path, dtype: str, tied: bool, shards: bool
) -> None:
    """This includes the self-check, whose probes are freed before the weights are loaded."""
    peak, after, weights, limit = measured(checkpoint(folder, dtype, tied, shards), "cpu", dtype, "model")
    assert after > 0.9 * weights
    assert max(peak, after) <= limit


def test_probes_beside_the_weights_are_noticed(folder: Path) -> None:
    peak, _, _, limit = measured(checkpoint(folder), "cpu", "float32", "model", "late")
    assert peak > limit
