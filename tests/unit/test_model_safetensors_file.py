"""Safetensors files: read as the format's own library reads them, refused in one line, larger than memory."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

from foredraft.cli import main
from foredraft.drafters.kangaroo import target_hash
from foredraft.errors import CheckpointError
from foredraft.model import memory, safetensors_file
from foredraft.model.safetensors_file import DTYPES, SafetensorsFile
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint, save_sparse

WRITTEN = [dtype for dtype in DTYPES.values() if dtype not in (torch.complex64, torch.float8_e8m0fnu)]


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 2, shape, generator=random).to(dtype)


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return the bytes of a file with a header, which is JSON or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize("pad", [b"", b" ", b"  " * 3 + b" "])
@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
def test_tensors_are_those_of_the_library(dtype: torch.dtype, pad: bytes, tmp_path: Path) -> None:
    tensors = {"a": make(dtype, 5, 3), "b": make(dtype), "none": make(dtype, 0, 4), "d": make(dtype, 7, 2, 2)}
    content, file = save(tensors), tmp_path / "x.safetensors"
    size = int.from_bytes(content[:8], "little")
    file.write_bytes(struct.pack("<Q", size + len(pad)) + content[8 : 8 + size] + pad + content[8 + size :])
    with SafetensorsFile(file) as own, safe_open(file, "pt") as library:
        assert sorted(own.keys()) == sorted(library.keys())
        for name in own.keys():  # noqa: SIM118
            found = own.get_tensor(name)
            assert found.dtype == dtype and torch.equal(found.double(), library.get_tensor(name).double())
            one, two = own.stored[name], library.get_slice(name)
            assert (one.dtype, [*one.shape]) == (two.get_dtype(), two.get_shape())
            assert found.data_ptr() % dtype.itemsize == 0
        for name in ("a", "d", "none"):
            whole = own.get_tensor(name)
            for rows in (slice(1, 3), slice(None, 1), slice(4, None), slice(2, 2), slice(None)):
                assert torch.equal(own.stored[name][rows].double(), whole[rows].double())


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def two(start: int, end: int) -> dict[str, Any]:
    return {"a": ONE, "b": {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few for a header"),
    "no header": (pack(b""), "has a header that is not JSON"),
    "a header beyond the file": (pack({}, length=3), "ends within its header of 3 bytes"),
    "a header without an end": (pack({}, length=2**64 - 1), f"ends within its header of {2**64 - 1} bytes"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "has a header that is not JSON"),
    "deep JSON": (pack(b"[" * 100_000), "has a header that is not JSON"),
    "a list": (pack([]), "has a header that is not a JSON object"),
    "a tensor that is none": (pack({"a": 1}), "without dtype, shape and data_offsets of 'a'"),
    "no shape": (pack({"a": {"dtype": "U8", "data_offsets": [0, 0]}}), "without dtype, shape and data_offsets"),
    "true as a size": (pack({"a": ONE | {"shape": [True]}}), "without dtype, shape and data_offsets of 'a'"),
    "a negative size": (pack({"a": ONE | {"shape": [-2]}}, b"\0" * 8), "without dtype, shape and data_offsets"),
    "an unknown dtype": (pack({"a": ONE | {"dtype": "F5"}}, b"\0" * 8), "tensor 'a' of dtype 'F5', which is not"),
    "one offset": (pack({"a": ONE | {"data_offsets": [8]}}, b"\0" * 8), "has tensor 'a' of shape [2] at [8]"),
    "an end before the start": (pack({"a": ONE | {"data_offsets": [8, 0]}}, b"\0" * 8), "at [8, 0]"),
    "too few bytes": (pack({"a": ONE | {"data_offsets": [0, 7]}}, b"\0" * 7), "in 7 bytes, but F32 of shape [2] takes 8"),
    "too many values": (pack({"a": ONE | {"shape": [2**62, 2**62]}}, b"\0" * 8), "in 8 bytes, but F32 of shape"),
    "too many dimensions": (pack({"a": ONE | {"shape": [2, *[1] * 20]}}, b"\0" * 8), "has tensor 'a' of shape [2, 1, 1"),
    "an incomplete file": (pack({"a": ONE}, b"\0" * 7), "ends within tensor 'a'"),
    "tensors that overlap": (pack(two(4, 12), b"\0" * 12), "has tensor 'b', which begins within the tensor before it"),
    "a gap": (pack(two(9, 12), b"\0" * 12), "has tensor 'b', which leaves a gap to the tensor before it"),
    "bytes behind": (pack({"a": ONE}, b"\0" * 9), "has 1 bytes behind its last tensor"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), attention_bias=True)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    content, says = BROKEN[name]
    file = shutil.copytree(folder, tmp_path / "model") / "model.safetensors"
    file.write_bytes(content)
    reads: tuple[Callable[[], object], ...] = (
        lambda: SafetensorsFile(file),
        lambda: load_decoder(file.parent, "meta"),
        lambda: target_hash(file.parent),
    )
    for read in reads:
        with pytest.raises(CheckpointError) as caught:
            read()
        message = str(caught.value)
        assert str(file) in message and says in message and "\n" not in message
        assert len(message) < 400 + len(str(file))


def test_what_is_no_file_or_shrinks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 10**12))
        opened.truncate(2 * 10**12)
    huge = "has a header of 1000000000000 bytes, more than"
    for path, says in (
        (file, huge),
        (tmp_path, r"cannot be read \("),
        (tmp_path / "none", r"cannot be read \("),
    ):
        with pytest.raises(CheckpointError, match=says):
            SafetensorsFile(path)
    save_file({"a": make(torch.float32, 5000)}, file)
    with SafetensorsFile(file) as sound:
        file.write_bytes(file.read_bytes()[:5000])
        with pytest.raises(
            CheckpointError, match=r"tensor a, which cannot be read \(it has become shorter\)"
        ):
            sound.get_tensor("a")


def test_random_damage_is_refused_where_the_library_refuses_it(tmp_path: Path) -> None:
    draw, file = random.Random(0), tmp_path / "x.safetensors"
    sound = save({name: make(torch.float32, 3, 4) for name in "abcd"})
    end, refused = 8 + int.from_bytes(sound[:8], "little"), 0
    for _ in range(500):
        damaged = bytearray(sound)
        for _ in range(draw.choice((1, 1, 3))):
            damaged[draw.randrange(end)] = draw.choice((draw.randrange(256), *b'0129"[]{},:'))
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        file.write_bytes(bytes(damaged))
        try:
            with SafetensorsFile(file) as own:
                found = {name: own.get_tensor(name) for name in own.keys()}  # noqa: SIM118
        except CheckpointError:
            refused += 1
            continue
        with safe_open(file, "pt") as library:
            assert {*library.keys()} == found.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor.double(), library.get_tensor(name).double())
    assert 100 < refused < 500


# --- larger than the memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_larger_than_the_memory_is_described_and_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model = save_sparse(tmp_path / "model")
    assert len(target_hash(folder)) == 64  # reads the first row of each tensor
    if kind == "gguf":
        pytest.importorskip("gguf")
        from tests.support.gguf_files import write_sparse_gguf

        model = write_sparse_gguf(folder, tmp_path / "model.gguf")
    says = f"the weights need 1024.0 GiB in {'float16' if kind == 'gguf' else 'bfloat16'}"
    capsys.readouterr()  # progress of saving
    assert main(["info", str(model), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert says in captured.out and captured.err == ""
    tokenizer = ["--tokenizer", str(folder)]
    assert main(["generate", "--model", str(model), "--device", "cpu", *tokenizer, "hi"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and says in captured.err


def test_the_headers_are_enough_for_the_device_meta(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "mapped_bytes", Mock(side_effect=AssertionError))
    load_decoder(folder, "meta")
    with pytest.raises(AssertionError):
        load_decoder(folder)


def test_no_more_is_mapped_than_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = Mock(wraps=memory.mmap.mmap)
    monkeypatch.setattr(memory.mmap, "mmap", mapped)
    file, page = tmp_path / "x.safetensors", memory.mmap.ALLOCATIONGRANULARITY
    save_file({"a": make(torch.float32, 4096, 64), "b": make(torch.float32, 4096, 64)}, file)
    with SafetensorsFile(file) as opened:
        for name in ("a", "b"):
            opened.stored[name][4000:4002]
            opened.get_tensor(name)
    lengths = [call.args[1] for call in mapped.call_args_list]
    assert [length <= rows * 64 * 4 + page for length, rows in zip(lengths, (2, 4096) * 2, strict=True)] == [
        True
    ] * 4
