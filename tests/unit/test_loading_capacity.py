"""Sizes of weights, dtypes of devices, and errors before a weight is read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import ConfigError, loading
from foredraft.kernels.compilation import library
from foredraft.loading import runners as devices
from foredraft.model import source
from foredraft.model.decoder import Decoder
from foredraft.model.runner.compiled import unpacked_because
from foredraft.model.runner.native.check import unserved_because
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, weight_bytes
from tests.support import checkpoints
from tests.support.running import python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


COUNTS = """
import sys
import torch
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes
found = weight_bytes(ModelSpec.from_hf(CONFIG), torch.device("cpu"), torch.float32)
assert found > 0 and "torch._dynamo" not in sys.modules
"""


@pytest.mark.heavy
def test_counting_bytes_imports_no_compiler(tmp_path: Path) -> None:
    """That would take as long as all other imports. Gemma's norms are sums, which "meta" does in Python."""
    folder = checkpoints.save_checkpoint(tmp_path / "model", "gemma2")
    python("-c", COUNTS.replace("CONFIG", repr(json.loads((folder / "config.json").read_text()))))


# --- sizes of weights ----------------------------------------------------------------------------------


def held(decoder: Decoder) -> int:
    """Return the bytes of a decoder's distinct tensors; a packed copy counts as the weight that it holds."""
    sizes: dict[int, int] = {}

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            key = id(part) if part.is_mkldnn else part.untyped_storage().data_ptr()
            sizes.setdefault(key, part.numel() * decoder.dtype.itemsize)
        elif part is not None and not isinstance(part, int):  # a window is no tensor
            rows, *columns = part.shape if hasattr(part, "shape") else part.weight.shape
            # weights in the kernels' layout share a region
            key = id(part.weight) if part.weight.is_mkldnn else part.weight.data_ptr()
            sizes[key] = math.prod([rows, *columns]) * decoder.dtype.itemsize
            if getattr(part, "bias", None) is not None:
                sizes[id(part.bias)] = rows * decoder.dtype.itemsize

    for part in (decoder.embedding, decoder.norm, decoder.output):
        add(part)
    for layer in decoder.layers:
        for weights_of in (layer.attention, layer.mlp):
            for name in weights_of.__dataclass_fields__:
                add(getattr(weights_of, name))
    return sum(sizes.values())


@pytest.fixture
def counted_anew() -> Iterator[None]:
    """Keep no count: with `unpacked_because` replaced it is another one."""
    weight_bytes.cache_clear()
    yield
    weight_bytes.cache_clear()


@pytest.mark.usefixtures("counted_anew")
@pytest.mark.parametrize("variant", "llama llama-gqa-tied llama-biases qwen3-tied gemma2 gemma3".split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["packed", "plain", "native"])
def test_weight_bytes_predicts_the_size_of_a_loaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, dtype: torch.dtype, layout: str
) -> None:
    folder = checkpoints.save_variant(tmp_path, variant)
    spec, native = ModelSpec.from_folder(folder), layout == "native"
    if layout != "packed":
        monkeypatch.setattr("foredraft.model.runner.compiled.unpacked_because", lambda *_: "for a test")
    served = not native or unserved_because(spec, CPU, dtype) is None
    if not (unpacked_because(CPU, dtype) is None if layout == "packed" else served):
        pytest.skip(f"products are not {layout} here")
    decoder = load_decoder(folder, CPU, dtype, native=native)
    monkeypatch.setattr(source, "SafetensorsFile", None)  # counting opens no file
    counted = weight_bytes(spec, CPU, dtype, native=native)
    assert counted == held(decoder)
    # an output matrix that oneDNN packs cannot serve as the embedding
    more = counted - weight_bytes(spec, CPU, dtype, native=True)
    doubled = spec.tied and layout == "packed"
    assert more == doubled * spec.vocab_size * spec.hidden_size * dtype.itemsize


@pytest.mark.skipif(library() is None, reason="no kernels")
@pytest.mark.parametrize("variant", ["llama", "llama-gqa-tied", "gemma3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_bytes_predicts_the_size_of_a_quantised_model(tmp_path: Path, variant: str, bits: int) -> None:
    """A tied embedding is the head's rows; another one has codes of its own."""
    folder = checkpoints.save_variant(tmp_path, variant)
    spec = ModelSpec.from_folder(folder)
    decoder = load_decoder(folder, CPU, torch.bfloat16, native=True, bits=bits)
    embedding = decoder.embedding
    assert isinstance(embedding, NativeCodes) and (embedding is decoder.output) is spec.tied
    parts = decoder.products if spec.tied else [*decoder.products, embedding]
    coded = [each for each in parts if isinstance(each, NativeCodes)]
    whole = sum(math.prod(each.shape) * 2 for each in coded)
    saved = whole - sum(each.weight.nbytes for each in coded)
    assert coded and weight_bytes(spec, CPU, torch.bfloat16, native=True, bits=bits) == held(decoder) - saved


# --- errors --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save_pair(tmp_path_factory.mktemp("models"))
    checkpoints.save_checkpoint(folder / "half", tokenizer=True, dtype=torch.bfloat16, num_hidden_layers=1)
    return folder


def free(monkeypatch: pytest.MonkeyPatch, **each: int) -> None:
    monkeypatch.setattr(loading.capacity, "free_memory", lambda device: each[device.type])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in each)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loading.runners, "load_decoder", None)  # errors come before a weight is read
    monkeypatch.setattr(source, "SafetensorsFile", None)


def size(folder: Path, dtype: torch.dtype) -> int:
    spec = ModelSpec.from_folder(folder)
    return weight_bytes(spec, CPU, dtype, native=unserved_because(spec, CPU, dtype) is None)


def test_a_model_larger_than_memory_is_not_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big, small = (size(models / name, torch.float32) for name in ("big", "small"))
    both = f"need {big / GIB:.3f} GiB in float32, those of the draft model {small / GIB:.3f} GiB in float32"
    for room, options, messages in (
        (big - 1, {}, ["in float32, but 0.001 GiB are free on cpu; give dtype='bfloat16'"]),
        (1000, {}, ["0.000 GiB are free on cpu; give a smaller model"]),
        (1000, {"dtype": "bfloat16"}, ["in bfloat16", "give a smaller model"]),
        (
            big + small - 1,
            {"draft": models / "small"},
            [both, "; give dtype='bfloat16', or leave the draft model out"],
        ),
        (big, {"draft": models / "half"}, ["draft model 0.000 GiB in bfloat16", "leave the draft model out"]),
    ):
        free(monkeypatch, cpu=room)
        with pytest.raises(ConfigError) as error:
            foredraft.load(models / "big", device="cpu", **options)  # type: ignore[arg-type]
        assert all(part in str(error.value) for part in messages), error.value
        assert "\n" not in str(error.value)


def test_another_device_is_suggested_if_it_fits(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
        free(monkeypatch, **{here: 1000, there: GIB})
        with pytest.raises(ConfigError, match=f"are free on {here}(:0)?; give device='{there}'$"):
            foredraft.load(models / "big", device=here)


def test_caches_only_use_memory_beside_the_weights(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, cpu=size(models / "big", torch.float32) + 1000)
    with pytest.raises(
        ConfigError, match="0 MiB may be used beside the weights; lower max_batch or max_length"
    ):
        foredraft.load(models / "big", device="cpu")


# --- dtypes of devices -------------------------------------------------------------------------------


def test_every_dtype_that_the_cpu_computes_in_is_accepted() -> None:
    for dtype in loading.checkpoints.DTYPES.values():
        devices.check_dtype(CPU, dtype)


@pytest.mark.parametrize(
    ("operator", "defect", "message"),
    [
        ("linear", RuntimeError("\"addmm\" not implemented for 'Half'\nmore"), '("addmm" not implemented'),
        ("rms_norm", NotImplementedError("no kernel image"), "(no kernel image)"),
        ("silu", None, "computes wrong values"),
    ],
)
def test_a_dtype_that_the_device_cannot_compute_in_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, operator: str, defect: Exception | None, message: str
) -> None:
    plain = getattr(torch.nn.functional, operator)

    def broken(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if x.dtype != torch.float16:
            return plain(x, *rest)
        if defect is not None:
            raise defect
        return plain(x, *rest) * 2

    monkeypatch.setattr(torch.nn.functional, operator, broken)
    monkeypatch.setattr(loading.runners, "load_decoder", None)
    with pytest.raises(ConfigError) as error:
        foredraft.load(models / "big", device="cpu", dtype="float16")
    line = str(error.value)
    assert line.startswith("dtype is 'float16', ") and message in line and "\n" not in line
    assert line.endswith("; give dtype='float32' or dtype='bfloat16'")


@pytest.mark.parametrize(("capability", "warned"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_emulated_bfloat16_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    warned: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with caplog.at_level(logging.WARNING):
        devices._warn_of_emulation(CUDA, torch.bfloat16)
    assert ("Tesla T4 (compute capability 7.5) emulates bfloat16" in caplog.text) == warned
    caplog.clear()
    devices._warn_of_emulation(CUDA, torch.float16)
    assert not caplog.text
