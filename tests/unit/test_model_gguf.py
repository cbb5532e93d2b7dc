"""A GGUF file gives the model of the checkpoint that it was written from, bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft.drafters.kangaroo import target_hash
from foredraft.errors import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model.checkpoint import first_values, weight_headers
from foredraft.model.config import generation_defaults
from foredraft.model.decoder import Decoder
from foredraft.model.families import gemma
from foredraft.model.gguf import tensors
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

pytest.importorskip("gguf")

from tests.support.gguf_files import save_dequantised, write_gguf

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
