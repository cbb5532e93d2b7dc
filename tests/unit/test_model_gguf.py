"""A GGUF file gives the model of the checkpoint that it was written from, bit for bit, or is refused by name."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft.drafters.kangaroo import target_hash
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from foredraft.model.checkpoint import first_values, weight_headers
from foredraft.model.config import generation_defaults
from foredraft.model.decoder import Decoder
from foredraft.model.families import gemma
from foredraft.model.gguf import file as module
from foredraft.model.gguf import tensors
from foredraft.model.gguf.file import BLOCKS, GGUFFile
from foredraft.model.locate import resolve
from foredraft.model.quantisation import blocks as formats
from foredraft.model.quantisation import scheme
from foredraft.model.quantisation.blocks import GGUFFormat
from foredraft.model.quantisation.codes import CodeFormat, Codes
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder, read_tensors
from tests.support.checkpoints import ROPES, TEXT, save_checkpoint
from tests.support.mutation import Mutant, assert_caught, defect
from tests.support.variants_llama_like import BY_LAYER, FULL, SHARED, SLIDING

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import KINDS, save_dequantised, write_gguf  # noqa: E402

GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16}  # the size of a head, as in the smaller Gemma models
LINEAR = {
    "full_attention": ROPES["linear"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    **{f"llama, {rope}": ("llama", {"rope_parameters": ROPES[rope]}) for rope in ("linear", "llama3")},
    "qwen2, yarn, tied": ("qwen2", {"rope_parameters": ROPES["yarn"], "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "gemma3, linear": ("gemma3", {**GEMMA, "rope_parameters": LINEAR}),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole blocks of every type


def wide(family: str) -> dict[str, Any]:
    return WIDE | ({"query_pre_attn_scalar": WIDE["head_dim"]} if family.startswith("gemma") else {})


def written(
    folder: Path, kind: str | dict[str, str], family: str = "llama", **keys: Any
) -> tuple[Path, Path]:
    """Write the file of a new model, and the checkpoint of its dequantised weights."""
    model = save_checkpoint(folder / "model", family, **wide(family), **keys)
    file = write_gguf(model, folder / "model.gguf", kind)
    return file, save_dequantised(model, file, folder / "other")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library()  # the kernels come from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(folder: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    runner, tokens = Runner(load_decoder(folder, dtype=dtype), deterministic=False), torch.arange(97)[None]
    found = runner.forward(runner.new_cache(1, 97), tokens, [0]).logits
    assert found is not None
    return found[0]


def check_same(folder: Path, file: Path, dtype: torch.dtype | None = None) -> None:
    assert torch.equal(logits(folder, dtype), logits(resolve(file), dtype))


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_float32_is_its_checkpoint(name: str, tmp_path: Path) -> None:
    family, keys = MODELS[name]
    folder = save_checkpoint(tmp_path / "model", family, tokenizer=True, **keys)
    file = write_gguf(folder, tmp_path / "model.gguf")
    spec, found = ModelSpec.from_folder(folder), resolve(file).spec
    assert found == spec
    check_same(folder, file)


def test_the_end_of_a_turn_ends_a_text_where_a_file_names_no_end(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True, eos_token_id=None)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<pad>", "<|im_end|>"))
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert resolve(file).spec.eos_token_ids == (0,)


OTHERS = dict.fromkeys(("BF16", "Q8_0", "Q4_0"), "bfloat16")


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), *OTHERS.items()])
def test_the_dtype_is_that_of_the_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    file = write_gguf(save_checkpoint(tmp_path / "model", **WIDE), tmp_path / "model.gguf", kind)
    assert resolve(file).spec.dtype == dtype
    own = write_gguf(save_checkpoint(tmp_path / "own", "gemma2", **WIDE), tmp_path / "own.gguf", kind)
    assert resolve(own).spec.dtype == ("float32" if kind == "F32" else "bfloat16")


def test_the_tokenizer_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True)
    file = write_gguf(folder, tmp_path / "model.gguf")
    own, found = (resolve(each).tokenizer() for each in (folder, file))
    assert own is not None and found is not None
    assert found.fingerprint == own.fingerprint and found.special == own.special
    ids = own.encode(TEXT)
    assert found.encode(TEXT) == ids and found.decode(ids) == own.decode(ids) == TEXT


def test_rows_are_read_apart(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", **WIDE)
    found = resolve(write_gguf(folder, tmp_path / "model.gguf"))
    whole = read_tensors(found, lambda name: True)
    first = dict(first_values(found))
    assert first.keys() == whole.keys()
    for name, tensor in whole.items():
        assert first[name] == tensor[:1].contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_model_has_one_hash_wherever_its_file_lies(tmp_path: Path, cache: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True)
    file = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    first = target_hash(resolve(file))
    assert target_hash(resolve(file.rename(tmp_path / "moved.gguf"))) == first
    other = write_gguf(save_checkpoint(tmp_path / "b", tokenizer=True, seed=1), tmp_path / "b.gguf", "Q8_0")
    assert target_hash(resolve(other)) != first


def test_sampling_defaults_come_from_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: Path
) -> None:
    def edit(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)

    file = write_gguf(save_checkpoint(tmp_path / "model"), tmp_path / "model.gguf", edit=edit)
    assert generation_defaults(resolve(file).generation or {}, file, 97) == {"temperature": 0.6, "top_k": 20}
    file = write_gguf(tmp_path / "model", file, edit=lambda w: w.add_float32("general.sampling.temp", -1.0))
    foredraft.load(file, device="cpu", max_length=64).close()
    assert f"{file}: temperature is -1.0" in caplog.text and str(cache) not in caplog.text


def check_written(kind: str, family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, other = written(Path(folder), kind, family, num_key_value_heads=2)
        check_same(other, file, torch.float32)


def check_coded(folder: Path, file: Path) -> Decoder:
    """Check that a file whose codes are kept stands for the weights of a folder."""
    found = load_decoder(resolve(file), dtype=torch.float32, native=True)
    other = load_decoder(folder, dtype=torch.float32)
    for one, two in zip(found.products, other.products, strict=True):
        assert torch.equal(one.dense(), two.dense())
    assert torch.equal(*(each.embed(torch.arange(each.spec.vocab_size)) for each in (found, other)))
    return found


NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")


@NEEDS_KERNELS
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("kind", "code_format"),
    [
        ("Q4_0", CodeFormat(4)),
        ("Q8_0", CodeFormat(8)),
        ("Q4_1", CodeFormat(4, unsigned=True, offsets=True)),
        ("Q5_0", CodeFormat(5)),
        ("Q5_1", CodeFormat(5, unsigned=True, offsets=True)),
        ("IQ4_NL", CodeFormat(4, codebook="iq4")),
        ("MXFP4", CodeFormat(4, codebook="mxfp4")),
        ("Q2_K", CodeFormat(2, group=16, unsigned=True, nested=True, offsets=True)),
        ("Q3_K", CodeFormat(3, group=16, nested=True)),
        ("Q4_K", CodeFormat(4, unsigned=True, nested=True, offsets=True)),
        ("Q5_K", CodeFormat(5, unsigned=True, nested=True, offsets=True)),
        ("Q6_K", CodeFormat(6, group=16, nested=True)),
        ("IQ4_XS", CodeFormat(4, nested=True, codebook="iq4")),
    ],
)
def test_the_kernels_keep_codes(kind: str, code_format: CodeFormat, family: str, tmp_path: Path) -> None:
    file, other = written(tmp_path, kind, family, tie_word_embeddings=True, num_hidden_layers=1)
    decoder = check_coded(other, file)
    assert all(isinstance(one, NativeCodes) and one.code_format == code_format for one in decoder.products)


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=NEEDS_KERNELS)], ids=["expanded", "coded"]
)
def test_weights_are_read_in_pieces_of_bounded_size(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama", vocab_size=1000, **WIDE)
    file = resolve(write_gguf(folder, tmp_path / "model.gguf", "Q8_0"))
    whole, read, sizes = load_decoder(file, native=native), GGUFFormat.codes, list[int]()

    def watched(format: GGUFFormat, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> Codes:
        sizes.append(shape[0] * shape[1])
        return read(format, shape, tensors)

    monkeypatch.setattr(scheme, "PIECE", 64 * WIDE["hidden_size"])
    monkeypatch.setattr(GGUFFormat, "codes", watched)
    decoder = load_decoder(file, native=native)
    assert max(sizes) == scheme.PIECE
    for product, other in zip(decoder.products, whole.products, strict=True):
        assert torch.equal(product.dense(), other.dense())


@NEEDS_KERNELS
def test_a_fused_layer_of_two_formats_stays_coded(tmp_path: Path) -> None:
    """Files of Q4_K_M have values in Q6_K beside queries and keys in Q4_K; others mix nested scales and plain."""
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "token_embd": "F16", "": "Q4_K"}
    file, other = written(tmp_path, kinds)
    check_same(other, file, torch.bfloat16)
    assert {kind for kind, _ in weight_headers(resolve(file)).values()} == {"F32", *kinds.values()}
    layer = check_coded(other, file).layers[0]
    assert layer.mlp is not None
    qkv, gate_up = layer.attention.qkv, layer.mlp.gate_up
    assert isinstance(qkv, NativeCodes) and qkv.code_format == CodeFormat(6, 16, nested=True, offsets=True)
    assert isinstance(gate_up, NativeCodes) and gate_up.code_format == CodeFormat(8, offsets=True, wide=True)


# --- Gemma 4 -------------------------------------------------------------------------------------------


JOINED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 8.0}
GEMMA4: dict[str, dict[str, Any]] = {
    "keys are values": JOINED,
    "shared keys": {**SHARED, **BY_LAYER, "use_double_wide_mlp": True},
}


def check_gemma4(name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_checkpoint(Path(temporary) / "model", "gemma4", **GEMMA4[name])
        file = write_gguf(folder, folder / "model.gguf", "F32")
        spec, found = ModelSpec.from_folder(folder), resolve(file).spec
        ends = {"eos_token_ids": spec.eos_token_ids, "bos_token_id": spec.bos_token_id}  # of the vocabulary
        assert replace(found, **ends) == spec
        check_same(folder, file, torch.float32)


@pytest.mark.parametrize("name", GEMMA4)
def test_a_file_of_gemma4_is_its_checkpoint(name: str) -> None:
    check_gemma4(name)


def test_keys_that_no_layer_reads_stay_unread(tmp_path: Path) -> None:
    """Published checkpoints hold keys and values of layers that read those of others, and so do their files."""
    folder = save_checkpoint(tmp_path / "model", "gemma4", **GEMMA4["shared keys"])
    weights = load_file(folder / "model.safetensors")
    more = {f"model.layers.5.self_attn.{part}_proj.weight": torch.randn(32, 64) for part in "kv"}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    check_same(folder, write_gguf(folder, tmp_path / "model.gguf"), torch.float32)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layer_types": [FULL, *[SLIDING] * 6]}, "sliding_window_pattern"),
        ({"global_head_dim": 64}, "rope_freqs.weight"),
        ({"num_key_value_heads": 4}, "blk.0.attn_k.weight"),
    ],
    ids=str,
)
def test_a_file_that_contradicts_itself_is_refused(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "gemma4", **JOINED)
    with pytest.raises(CheckpointError, match=named):
        resolve(write_gguf(folder, tmp_path / "model.gguf", **keys))


# --- files that cannot be read: each is refused in one line that names it, and what is wrong ----------------

Arrays = dict[str, np.ndarray]


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
        (
            lambda data: data.replace(b"llama", b"lxama"),
            "has the architecture 'lxama', which is not supported",
        ),
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


# --- planted defects ---------------------------------------------------------------------------------

F32, Q4_K = (partial(partial, check_written, kind) for kind in ("F32", "Q4_K"))
KEYS_AS_VALUES, SHARED_KEYS = (partial(check_gemma4, name) for name in GEMMA4)
DEFECTS = [
    defect("rows as in the file", tensors.row_order, lambda sound: lambda *_: None, F32("llama")),
    defect("q with the heads of k", tensors.row_order, lambda sound: lambda *of: sound(*of[:3], of[4], of[4]), F32("llama")),
    defect("norms keep the one", tensors.adds_one, lambda sound: lambda *_: False, F32("gemma2")),
    defect("high halves first", formats.fields, lambda sound: lambda *of: sound(*of).flip(-2), Q4_K("qwen2")),
    defect("norms lose one", tensors.adds_one, lambda sound: lambda kind, name: "norm." in name, KEYS_AS_VALUES),
    defect("all frequencies turn", gemma._turning, lambda sound: lambda *_: 1.0, SHARED_KEYS),
    defect("values are no keys", gemma._joined, lambda sound: lambda *_: False, KEYS_AS_VALUES, CheckpointError),
]  # fmt: skip


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check()
    assert_caught(mutant, monkeypatch)
