"""Packed weights in the user's cache: a later load has the same ones, and any other load packs its own."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import user_cache
from foredraft.kernels.compilation import library
from foredraft.model import kept_weights as module
from foredraft.model.decoder import Decoder
from foredraft.model.layer_weights import LayerBuilder
from foredraft.model.locate import resolve, with_loras
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint
from tests.support.foreign import NOT_PRIVATE
from tests.support.gguf_files import write_gguf
from tests.support.limits import no_more_bytes
from tests.support.loras import save_lora
from tests.support.quantising import KINDS, quantise

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TOKENS = torch.arange(3, 35)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "NEW", 0)
    return tmp_path / "cache" / module.KIND


class Packs:
    """Loads, and whether the last one packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.count, own = monkeypatch, 0, LayerBuilder._product

        def product(*arguments: Any) -> Any:
            self.count += 1
            return own(*arguments)

        monkeypatch.setattr(LayerBuilder, "_product", product)

    def __call__(self, folder: Path, **options: Any) -> tuple[Decoder, bool]:
        before = self.count
        return load_decoder(folder, native=True, **options), self.count > before

    def unkept(self, folder: Path, **options: Any) -> Decoder:
        with self.monkeypatch.context() as patch:
            patch.setenv("FOREDRAFT_CACHE", "")
            return load_decoder(folder, native=True, **options)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Packs:
    return Packs(monkeypatch)


def assert_same(one: Decoder, other: Decoder) -> None:
    """Compare all that the kernels read of two decoders, and their logits, to the bit."""
    assert len(one.products) == len(other.products)
    for mine, its in zip(one.products, other.products, strict=True):
        assert type(mine) is type(its)
        for field in fields(mine):  # type: ignore[arg-type]
            a, b = getattr(mine, field.name), getattr(its, field.name)
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            else:
                assert a == b
    assert torch.equal(*(logits(each) for each in (one, other)))


def logits(decoder: Decoder) -> Tensor:
    runner = Runner(decoder)
    found = runner.forward(runner.new_cache(1, 32), TOKENS, [0]).logits
    assert found is not None
    return found


def save(folder: Path, family: str = "llama", **keys: Any) -> Path:
    return save_checkpoint(folder / "model", family, **keys)


def lora(folder: Path) -> Path:
    return with_loras(save(folder), [save_lora(folder / "model", folder / "lora")])


def quantised(kind: str, folder: Path) -> Path:
    quantise(save(folder, **WIDE), KINDS[kind])
    return folder / "model"


def gguf(kind: str, folder: Path) -> Path:
    return resolve(write_gguf(save(folder, tie_word_embeddings=True, **WIDE), folder / "model.gguf", kind))


MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": save,
    "biases": partial(save, family="qwen2", dtype=torch.bfloat16),
    "gemma3": partial(save, family="gemma3"),
    "lora": lora,
    "gguf": partial(gguf, "Q4_K"),
    "codebook": partial(gguf, "IQ4_XS"),
    **{kind: partial(quantised, kind) for kind in KINDS},
}


@pytest.mark.parametrize("fast", [True, False], ids=["mapped", "copied"])
@pytest.mark.parametrize("name", MODELS)
def test_a_later_load_packs_nothing(
    name: str, fast: bool, tmp_path: Path, load: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "as_fast_as_arena", lambda tensors: fast)
    folder = MODELS[name](tmp_path)
    first, packed = load(folder)
    assert packed
    second, packed = load(folder)
    assert not packed
    assert_same(first, second)
    assert_same(second, load.unkept(folder))
    assert ("/cache/" in maps_of(second)) == fast


def maps_of(decoder: Decoder) -> str:
    """Return the line of the memory map in which the weights of the head are."""
    output: Any = decoder.output
    address = output.weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return line
    raise AssertionError


def test_quantised_weights_are_kept_by_their_bits_and_dtype(tmp_path: Path, load: Packs) -> None:
    folder, short = save(tmp_path), torch.bfloat16
    settings = ((None, short), (4, short), (8, short), (4, torch.float32))
    for packs in (True, False):
        for bits, dtype in settings:
            found, packed = load(folder, bits=bits, dtype=dtype)
            assert packed == packs
            assert_same(found, load.unkept(folder, bits=bits, dtype=dtype))


def changed(file: Path, change: Callable[[Path], object]) -> None:
    """Change a file, and give it its old time."""
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def loras(folder: Path, *seeds: int) -> Path:
    """Return the base of `lora` with other LoRAs; a negative seed stands for its own."""
    base, own = folder / "model", folder / "lora"
    saved = [own if seed < 0 else save_lora(base, folder / f"lora{seed}", seed=seed) for seed in seeds]
    return with_loras(base, saved)


def flipped(file: str, model: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        changed(folder / file, flip)
        return model(folder)

    return change


def replaced_by_another(folder: Path) -> Path:
    other = save_checkpoint(folder / "other", "llama", seed=1) / "model.safetensors"
    changed(folder / "model" / other.name, other.replace)
    return folder / "model"


WEIGHTS, ADAPTER = "model/model.safetensors", "lora/adapter_model.safetensors"
CHANGES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a byte": ("plain", flipped(WEIGHTS, lambda folder: folder / "model")),
    "a byte of a GGUF file": ("gguf", flipped("model.gguf", lambda folder: resolve(folder / "model.gguf"))),
    "a byte of a LoRA": ("lora", flipped(ADAPTER, lambda folder: loras(folder, -1))),
    "a byte below a LoRA": ("lora", flipped(WEIGHTS, lambda folder: loras(folder, -1))),
    "another LoRA": ("lora", lambda folder: loras(folder, 1)),
    "a LoRA more": ("lora", lambda folder: loras(folder, -1, 1)),
    "no LoRA": ("lora", lambda folder: folder / "model"),
    "another file in its place": ("plain", replaced_by_another),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_model_is_packed_anew(name: str, tmp_path: Path, load: Packs) -> None:
    """Also where it has the size and the time of the kept one."""
    model, change = CHANGES[name]
    load(MODELS[model](tmp_path))
    folder = change(tmp_path)
    found, packed = load(folder)
    assert packed
    assert_same(found, load.unkept(folder))


@pytest.mark.parametrize("name", ["code_digest", "sources_digest", "describe_cpu"])
def test_other_code_and_other_cpus_pack_anew(
    name: str, tmp_path: Path, load: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path)
    load(folder)
    monkeypatch.setattr(module, name, lambda: "another")
    assert load(folder)[1]


def test_files_that_change_while_they_are_loaded_are_not_kept(
    tmp_path: Path, load: Packs, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, keep = save(tmp_path), module.KeptWeights.keep
    for constant, value in (("NEW", 60e9), ("LEAST", 2**30)):
        with monkeypatch.context() as patch:
            patch.setattr(module, constant, value)
            load(folder)
        assert not cache.exists(), f"{constant}: new files and small weights are not kept either"

    def later(self: module.KeptWeights) -> None:
        flip(folder / "model.safetensors")
        keep(self)

    monkeypatch.setattr(module.KeptWeights, "keep", later)
    load(folder)
    assert not cache.exists()


def replaced(file: Path, _: pytest.MonkeyPatch) -> None:
    shutil.copy(file, file.with_name("copy"))
    changed(file, file.with_name("copy").replace)


DAMAGE: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "cut": lambda file, _: os.truncate(file, file.stat().st_size - 1),
    "damaged": lambda file, _: changed(file, flip),
    "replaced": replaced,
    "removed": lambda file, _: file.unlink(),
    "undocumented": lambda file, _: file.with_suffix(".json").unlink(),
    **NOT_PRIVATE,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_is_damaged_or_foreign_is_not_used(
    name: str, tmp_path: Path, load: Packs, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = load(save(tmp_path))
    [file] = cache.glob(f"*{module.SUFFIX}")
    DAMAGE[name](file, monkeypatch)
    found, packed = load(tmp_path / "model")
    assert packed
    assert_same(first, found)


def test_a_full_disk_is_one_line(
    tmp_path: Path, load: Packs, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = save(tmp_path)
    with no_more_bytes(2**16):
        load(folder)
    assert [line for line in caplog.messages if "weights cannot be kept (" in line and "\n" not in line]
    assert not [*cache.iterdir()]
    assert load(folder)[1]
    assert not load(folder)[1]


def test_a_share_of_the_disk_is_enough(
    tmp_path: Path, load: Packs, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The least recently used model leaves; what does not fit in any case leaves the others."""
    caplog.set_level(logging.INFO)
    models = [save_checkpoint(tmp_path / str(seed), "llama", seed=seed) for seed in range(3)]
    for folder in models[:2]:
        load(folder)
        for document in cache.glob("*.json"):  # uses within one tick of the clock of files have one time
            os.utime(document, ns=(0, document.stat().st_mtime_ns - 10**9))
    [size, _] = [file.stat().st_size for file in cache.glob(f"*{module.SUFFIX}")]
    assert not load(models[0])[1]

    def free(models: float) -> None:
        """Let a share of the disk hold so many models."""
        held = sum(file.stat().st_size for file in cache.glob(f"*{module.SUFFIX}"))
        usage = shutil.disk_usage(cache)._replace(free=int(models * size) * user_cache.DISK_SHARE - held)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    free(2.5)
    load(models[2])
    assert [load(folder)[1] for folder in (models[0], models[2])] == [False, False]
    free(0.5)
    assert load(models[1])[1]
    assert "too much of the disk" in caplog.text
    assert len([*cache.glob(f"*{module.SUFFIX}")]) == 2
