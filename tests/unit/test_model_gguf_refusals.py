"""GGUF files that cannot be read: each is refused in one line that names the file, and what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foredraft
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from foredraft.model.gguf import file as module
from foredraft.model.gguf.file import BLOCKS, GGUFFile
from foredraft.model.locate import resolve
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import KINDS, write_gguf  # noqa: E402

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "model", tokenizer=True)


@pytest.fixture(scope="module")
def sound(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(folder, tmp_path_factory.mktemp("file") / "model.gguf").read_bytes()


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(resolve(file))
    message = str(caught.value)
    assert str(file) in message and "\n" not in message and str(file.parent / "cache") not in message
    return message


def test_a_file_is_read_alike_with_and_without_its_lists(sound: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound)
    whole = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"]
    found, without = GGUFFile(file), GGUFFile(file, lists=False)
    assert found.metadata["tokenizer.ggml.tokens"] == whole.contents()
    assert without.metadata["tokenizer.ggml.tokens"] == []
    assert found.tensors == without.tensors and found.tensors


@pytest.mark.parametrize(
    ("length", "says"), [(2**60, "ends too early"), (2**10, "a text of 1024 bytes"), (4, "not UTF-8")]
)
def test_a_broken_text_in_a_list_is_refused(
    length: int, says: str, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TEXT", 2**9)
    at = sound.index(struct.pack("<Q", 5) + b"<pad>")
    file = tmp_path / "model.gguf"
    file.write_bytes(sound[:at] + struct.pack("<Q", length) + b"\xff" * 5 + sound[at + 13 :])
    assert says in refusal(file)


def put(start: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:start] + struct.pack(kind, value) + data[start + struct.calcsize(kind) :]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GG", "is not a GGUF file"),
        (lambda data: b"ABCD" + data[4:], "is not a GGUF file"),
        (put(4, "<I", 1), "version 1"),
        (put(4, ">I", 3), "big-endian"),
        (put(8, "<Q", 2**62), "model.gguf"),  # tensors
        (put(16, "<Q", 2**62), "model.gguf"),  # metadata
        (lambda data: data[:20], "ends too early"),
        (lambda data: data[:500], "ends too early"),
        (lambda data: data[:-100], "ends within tensor"),
        (lambda data: data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "tensor 'blk.0.ffn_up.weight' twice"),
        (lambda data: data.replace(b"bos_token_id", b"eos_token_id"), "ggml.eos_token_id' twice"),
        (lambda data: data.replace(b"llama", b"lxama"), "'lxama', which is not supported; supported are"),
    ],
)
def test_a_broken_container_is_refused(
    tmp_path: Path, sound: bytes, content: Callable[[bytes], bytes], says: str
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content(sound))
    assert says in refusal(file)


def remove(name: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {own: value for own, value in tensors.items() if own != name}


def add(name: str, *shape: int) -> Callable[[Arrays], Arrays]:
    return lambda tensors: tensors | {name: np.zeros(shape, np.float32)}


ROPE = "rope_freqs.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_every_type_that_is_cut_or_shifted_is_named(tmp_path: Path, kind: str) -> None:
    folder = save_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    data, tensors = file.read_bytes(), GGUFFile(file).tensors
    last = max(tensors.values(), key=lambda info: info.start)
    _, block = BLOCKS[last.dtype]
    for cut in (1, block, last.size // 2):
        file.write_bytes(data[: last.start + last.size - cut])
        assert f"ends within tensor {last.name}" in refusal(file)
    # behind its name: dimensions, sizes, type and offset of a tensor
    at = data.index(last.name.encode()) + len(last.name)
    offset = at + 4 + 8 * len(last.shape) + 4
    shifted = (int.from_bytes(data[offset : offset + 8], "little") - 1).to_bytes(8, "little")
    file.write_bytes(data[:offset] + shifted + data[offset + 8 :])
    assert f"has tensor {last.name} at an offset that is not aligned" in refusal(file)
    odd = next(info for info in tensors.values() if info.dtype == kind)
    at = data.index(odd.name.encode()) + len(odd.name) + 4
    file.write_bytes(data[:at] + (odd.shape[-1] - 8).to_bytes(8, "little") + data[at + 8 :])
    assert (
        f"has tensor {odd.name} with rows of {odd.shape[-1] - 8} values, but {kind} has blocks of"
        in refusal(file)
    )


def unsupported_type(writer: Any) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("extra.weight", np.zeros((4, 292), np.uint8), raw_dtype=kind)


TENSORS = [
    (remove("blk.1.ffn_up.weight"), "lacks tensor blk.1.ffn_up.weight"),
    (remove("token_embd.weight"), "has no matrix token_embd.weight"),
    (add("blk.0.attn_k.weight", 8, 64), "has tensor blk.0.attn_k.weight of shape [8, 64], but its metadata"),
    (add("blk.9.attn_k.weight", 64, 64), "has tensor blk.9.attn_k.weight, which is not part of a Llama"),
    (add("blk.01.attn_k.weight", 64, 64), "has tensor blk.01.attn_k.weight, which is not part of a Llama"),
    (add(ROPE, 3), " numbers in rope_freqs.weight"),
    (lambda t: add(ROPE, t["blk.0.attn_q.weight"].shape[0] // 8)(t), ROPE),
]
EDITS = [
    (unsupported_type, "has tensor extra.weight of type Q8_K, which is not supported; take a file with F32"),
    (lambda w: w.add_uint32("llama.expert_count", 8), "expert_count is 8; only 0 is supported"),
    (lambda w: w.add_uint32("llama.other_key", 1), "other_key"),
    (lambda w: w.add_float32("llama.attention.scale", 0.5), "attention.scale"),
    (lambda w: w.add_uint32("llama.attention.sliding_window", 16), "attention.sliding_window"),
    (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "supported are none, linear, yarn"),
    (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.5), "rope.scaling.attn_factor"),
    (lambda w: w.add_eot_token_id(384), "eos_token_id is [2, 384], but vocab_size is 384"),
    (lambda w: w.add_uint32("general.alignment", 12), "has the alignment 12; it must be a multiple of 8"),
]
CHANGES: list[tuple[dict[str, Callable[..., Any]], str]] = [
    *(({"tensors": change}, says) for change, says in TENSORS),
    *(({"edit": change}, says) for change, says in EDITS),
]


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=[says[:40] for _, says in CHANGES])
def test_tensors_and_metadata_that_are_not_understood_are_refused(
    tmp_path: Path, folder: Path, change: dict[str, Callable[..., Any]], says: str
) -> None:
    assert says in refusal(write_gguf(folder, tmp_path / "model.gguf", **change))


CHAT = "tokenizer.chat_template"


def no_pad(writer: Any) -> None:
    """End texts by a token that the tokenizer lacks."""
    writer.kv_data[0]["tokenizer.ggml.token_type"].value[0] = gguf.TokenType.UNUSED
    writer.add_eot_token_id(0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"edit": lambda w: w.add_uint32(CHAT, 7)}, "has a chat template that is not a text"),
        ({"edit": lambda w: w.add_array(f"{CHAT}.tool_use", [1])}, "has a chat template that is not a text"),
        (
            {"edit": no_pad},
            "has a vocabulary that is not its model's: it has no token 0, which is the model's eos_tok",
        ),
        ({"pre": "other"}, "has a vocabulary with the pre-tokenizer 'other', which is not supported"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, folder: Path, changes: dict[str, Any], says: str
) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError) as caught:
        foredraft.load(file, device="cpu")
    message = str(caught.value)
    assert f"{file} {says}" in message and "\n" not in message and str(tmp_path / "cache") not in message
    assert message.endswith("give the folder of the model's tokenizer as tokenizer")
    with pytest.raises(ConfigError, match=r"which has no tokenizer\.json"):
        foredraft.load(file, tokenizer=tmp_path, device="cpu")
    with foredraft.load(file, tokenizer=folder, device="cpu", max_length=64) as llm:
        assert llm.loaded.tokenizer is not None
