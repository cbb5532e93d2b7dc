"""GGUF files that cannot be read: each is refused in one line that names the file, and what is wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foredraft
from foredraft.cli import main
from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.gguf import file as module
from foredraft.model.gguf.file import BLOCKS, GGUFFile
from foredraft.model.hub import resolve
from foredraft.model.weights import load_decoder
from tests.support.checkpoints import save_checkpoint

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import KINDS, write_gguf  # noqa: E402

Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("block", [2, 9, 100, 2**20])
def test_a_file_is_read_alike_in_blocks_of_any_size(
    block: int, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and their lengths lie across the ends of blocks."""
    file = tmp_path / "model.gguf"
    file.write_bytes(sound)
    whole = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"]
    monkeypatch.setattr(module, "BUFFER", block)
    found, without = GGUFFile(file), GGUFFile(file, lists=False)
    assert found.metadata["tokenizer.ggml.tokens"] == whole.contents()
    assert without.metadata["tokenizer.ggml.tokens"] == []
    assert found.tensors == without.tensors and found.tensors


@pytest.mark.parametrize("block", [9, 2**20])
@pytest.mark.parametrize(
    ("length", "says"), [(2**60, "ends too early"), (2**10, "a text of 1024 bytes"), (4, "not UTF-8")]
)
def test_a_broken_text_in_a_list_is_refused(
    block: int, length: int, says: str, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUFFER", block)
    monkeypatch.setattr(module, "MAX_TEXT", 2**9)
    at = sound.index(struct.pack("<Q", 5) + b"<pad>")
    file = tmp_path / "model.gguf"
    file.write_bytes(sound[:at] + struct.pack("<Q", length) + b"\xff" * 5 + sound[at + 13 :])
    assert says in refusal(file)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GG", "is not a GGUF file"),
        (lambda data: b"ABCD" + data[4:], "is not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
        (lambda data: data[:20], "ends too early"),
        (lambda data: data[:500], "ends too early"),
        (lambda data: data[:-100], "ends within tensor"),
        (
            lambda data: data.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"),
            "has tensor 'blk.0.ffn_up.weight' twice",
        ),
        (
            lambda data: data.replace(b"bos_token_id", b"eos_token_id"),
            "has 'tokenizer.ggml.eos_token_id' twice",
        ),
        (lambda data: data[:8] + struct.pack("<Q", 2**62) + data[16:], "model.gguf"),
        (lambda data: data[:16] + struct.pack("<Q", 2**62) + data[24:], "model.gguf"),
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


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (remove("blk.1.ffn_up.weight"), "lacks tensor blk.1.ffn_up.weight"),
        (remove("token_embd.weight"), "has no matrix token_embd.weight"),
        (
            add("blk.0.attn_k.weight", 8, 64),
            "has tensor blk.0.attn_k.weight of shape [8, 64], but its metadata",
        ),
        (add("blk.9.attn_k.weight", 64, 64), "has tensor blk.9.attn_k.weight, which is not part of a Llama"),
        (
            add("blk.01.attn_k.weight", 64, 64),
            "has tensor blk.01.attn_k.weight, which is not part of a Llama",
        ),
        (add("rope_freqs.weight", 3), "has rope_freqs.weight of shape [3]"),
        (lambda t: add("rope_freqs.weight", t["blk.0.attn_q.weight"].shape[0] // 8)(t), "rope_freqs.weight"),
    ],
)
def test_other_tensors_than_the_models_are_refused(
    tmp_path: Path, folder: Path, tensors: Callable[[Arrays], Arrays], says: str
) -> None:
    assert says in refusal(write_gguf(folder, tmp_path / "model.gguf", tensors=tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_every_type_that_is_cut_or_shifted_is_named(tmp_path: Path, kind: str) -> None:
    """The last tensor ends early by a byte, by a block and by half; its place is a byte late; its rows are odd."""
    folder = save_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    data, tensors = file.read_bytes(), GGUFFile(file).tensors
    last = max(tensors.values(), key=lambda info: info.start)
    _, block = BLOCKS[last.kind]
    for cut in (1, block, last.size // 2):
        file.write_bytes(data[: last.start + last.size - cut])
        assert f"ends within tensor {last.name}" in refusal(file)
    # behind its name: dimensions, sizes, type and offset of a tensor
    at = data.index(last.name.encode()) + len(last.name)
    offset = at + 4 + 8 * len(last.shape) + 4
    shifted = (int.from_bytes(data[offset : offset + 8], "little") - 1).to_bytes(8, "little")
    file.write_bytes(data[:offset] + shifted + data[offset + 8 :])
    assert f"has tensor {last.name} at an offset that is not aligned" in refusal(file)
    odd = next(info for info in tensors.values() if info.kind == kind)
    at = data.index(odd.name.encode()) + len(odd.name) + 4
    file.write_bytes(data[:at] + (odd.shape[-1] - 8).to_bytes(8, "little") + data[at + 8 :])
    assert (
        f"has tensor {odd.name} with rows of {odd.shape[-1] - 8} values, but {kind} has blocks of"
        in refusal(file)
    )


def test_a_type_that_is_not_supported_is_named(tmp_path: Path, folder: Path) -> None:
    def edit(writer: Any) -> None:
        blocks = np.zeros((4, 292), np.uint8)
        writer.add_tensor("extra.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_K)

    message = refusal(write_gguf(folder, tmp_path / "model.gguf", edit=edit))
    assert "has tensor extra.weight of type Q8_K, which is not supported; take a file with F32" in message


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "expert_count is 8; only 0 is supported"),
        (lambda w: w.add_uint32("llama.other_key", 1), "other_key"),
        (lambda w: w.add_float32("llama.attention.scale", 0.5), "attention.scale"),
        (lambda w: w.add_uint32("llama.attention.sliding_window", 16), "attention.sliding_window"),
        (
            lambda w: w.add_uint16("split.count", 3),
            "is one of 3 parts, but its name does not end in -00001-of-00003.gguf",
        ),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "supported are none, linear, yarn"),
        (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.5), "rope.scaling.attn_factor"),
        (lambda w: w.add_eot_token_id(384), "eos_token_id is [2, 384], but vocab_size is 384"),
        (lambda w: w.add_uint32("general.alignment", 12), "has the alignment 12; it must be a multiple of 8"),
    ],
)
def test_metadata_that_are_not_understood_are_refused(
    tmp_path: Path, folder: Path, edit: Callable[[Any], None], says: str
) -> None:
    assert says in refusal(write_gguf(folder, tmp_path / "model.gguf", edit=edit))


def test_an_unknown_architecture_is_named(tmp_path: Path, sound: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound.replace(b"llama", b"lxama"))
    message = refusal(file)
    assert "has the architecture 'lxama', which is not supported; supported are " in message
    assert message.endswith("Did you mean 'llama'?")
    file.write_bytes(sound.replace(b"llama", b"mamba"))
    assert "'mamba', which is not supported: it is a model with recurrent layers; give a dense" in refusal(
        file
    )


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path, sound: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(sound)
    made = resolve(file)
    file.write_bytes(sound + b"\0")
    with pytest.raises(CheckpointError, match="has changed while it was used"):
        load_decoder(made)
    load_decoder(resolve(file))  # made again
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be read"):
        load_decoder(made)


def test_random_damage_is_refused_or_harmless(tmp_path: Path, sound: bytes) -> None:
    """Whatever bytes are flipped or cut off, a `CheckpointError` comes, or a model."""
    draw, file = random.Random(0), tmp_path / "model.gguf"
    heads = sound.index(b"output_norm") + 400  # past the metadata, among the tensors' heads
    for _ in range(200):
        damaged = bytearray(sound)
        for _ in range(draw.choice((1, 1, 4))):
            damaged[draw.randrange(min(heads, len(damaged)))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        file.write_bytes(bytes(damaged))
        with suppress(CheckpointError):
            load_decoder(resolve(file))


# --- as a user meets them ------------------------------------------------------------------------------------


def test_the_command_refuses_in_one_line(
    tmp_path: Path, sound: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(sound[:500])
    for command in (["info"], ["generate", "a"], ["quantise", "--out", str(tmp_path / "out")]):
        assert main([*command, "--model", str(tmp_path / "model.gguf")]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "model.gguf ends too early" in told


def no_pad(writer: Any) -> None:
    """End texts by a token that the tokenizer lacks."""
    writer.kv_data[0]["tokenizer.ggml.token_type"].value[0] = gguf.TokenType.UNUSED
    writer.add_eot_token_id(0)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda w: w.add_uint32("tokenizer.chat_template", 7), "has a chat template that is not a text"),
        (
            lambda w: w.add_array("tokenizer.chat_template.tool_use", [1]),
            "has a chat template that is not a text",
        ),
        (no_pad, "has a vocabulary that is not its model's: it has no token 0, which is the model's eos_tok"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, folder: Path, edit: Callable[[Any], None], says: str
) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", edit=edit)
    with pytest.raises(CheckpointError) as caught:
        foredraft.load(file, device="cpu")
    message = str(caught.value)
    assert f"{file} {says}" in message and "\n" not in message and str(tmp_path / "cache") not in message
    assert message.endswith("give the folder of the model's tokenizer as tokenizer")
    foredraft.load(file, tokenizer=folder, device="cpu", max_length=64).close()


def test_a_vocabulary_that_is_not_known_needs_a_tokenizer(tmp_path: Path, folder: Path) -> None:
    file = write_gguf(folder, tmp_path / "model.gguf", pre="other")
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'other', which is not supported.*tokenizer"):
        foredraft.load(file, device="cpu")
    with pytest.raises(ConfigError, match=r"which has no tokenizer\.json"):
        foredraft.load(file, tokenizer=tmp_path, device="cpu")
    with (
        foredraft.load(file, tokenizer=folder, device="cpu", max_length=64) as llm,
        foredraft.load(folder, device="cpu", max_length=64) as plain,
    ):
        params = foredraft.SamplingParams(temperature=0, max_new_tokens=8)
        assert llm.generate("the cat", params)[0].text == plain.generate("the cat", params)[0].text


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96)
    file = write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"model\.gguf is quantised already \(gguf, Q8_0\)"):
        foredraft.load(file, device="cpu", weights="int4")
