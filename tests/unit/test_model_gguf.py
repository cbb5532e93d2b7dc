"""A GGUF file gives the model of the checkpoint that it was written from, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import SamplingParams
from foredraft.drafters.adapter_files import target_hash
from foredraft.kernels.compilation import library
from foredraft.loading.inspection import inspect_models
from foredraft.model.checkpoint import first_values, weight_headers
from foredraft.model.generation import generation_defaults
from foredraft.model.gguf import names
from foredraft.model.hub import resolve
from foredraft.model.quantisation import Codes, Coding, scheme
from foredraft.model.quantisation.blocks import bits
from foredraft.model.quantisation.gguf import GGUFFormat
from foredraft.model.runner import Runner
from foredraft.model.runner.native import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.weights import load_decoder, read_tensors
from tests.support.checkpoints import ROPES, TEXT, save_checkpoint
from tests.support.planting import Mutant, assert_caught, defect

pytest.importorskip("gguf")

from tests.support.gguf_files import KINDS, save_dequantised, write_gguf

GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 16}  # the size of a head, as in the smaller Gemma models
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama, norms": ("llama", {"rms_norm_eps": 1e-5}),
    **{
        f"llama, {rope}": ("llama", {"rope_parameters": ROPES[rope]}) for rope in ("linear", "llama3", "yarn")
    },
    "qwen2": ("qwen2", {}),
    "qwen2, yarn, tied": ("qwen2", {"rope_parameters": ROPES["yarn"], "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3", GEMMA),
    "gemma3, linear": (
        "gemma3",
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": ROPES["linear"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole blocks of every type


def wide(family: str) -> dict[str, Any]:
    """Return the keys of a model of a family that every type can hold."""
    return WIDE | ({"query_pre_attn_scalar": WIDE["head_dim"]} if family.startswith("gemma") else {})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(folder: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the logits [T, V] of a prompt."""
    runner = Runner(load_decoder(folder, dtype=dtype), deterministic=False)
    tokens = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(7))
    found = runner.forward(runner.new_cache(1, 40), tokens, [0]).logits
    assert found is not None
    return found[0]


def check_same(folder: Path, file: Path, dtype: torch.dtype | None = None) -> None:
    """Check that a file is the model of a folder."""
    found = resolve(file)
    for index, (a, b) in enumerate(zip(values(folder, dtype), values(found, dtype), strict=True)):
        assert torch.equal(a, b), f"tensor {index} differs"
    assert torch.equal(logits(folder, dtype), logits(found, dtype))


def values(folder: Path, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the embedding and the norms of a decoder; the logits tell of the other tensors."""
    decoder, found = load_decoder(folder, dtype=dtype), []
    for part in (part for layer in decoder.layers for part in (layer.attention, layer.mlp)):
        for name in ("norm", "post_norm", "q_norm", "k_norm"):
            norm = getattr(part, name, None)
            found += [] if norm is None else [norm.weight]
    return [decoder.embedding, decoder.norm.weight, *found]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_float32_is_its_checkpoint(name: str, tmp_path: Path) -> None:
    family, keys = MODELS[name]
    folder = save_checkpoint(tmp_path / "model", family, tokenizer=True, **keys)
    file = write_gguf(folder, tmp_path / "model.gguf")
    spec, found = ModelSpec.from_folder(folder), ModelSpec.from_folder(resolve(file))
    assert found == spec
    check_same(folder, file)


def test_the_end_of_a_turn_ends_a_text_where_a_file_names_no_end(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True, eos_token_id=None)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<pad>", "<|im_end|>"))
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert ModelSpec.from_folder(resolve(file)).eos_token_ids == (0,)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("kind", ["BF16", "F16", *KINDS])
def test_a_quantised_file_is_the_checkpoint_of_its_dequantised_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", family, **wide(family))
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    other = save_dequantised(folder, file, tmp_path / "other")
    check_same(other, file, torch.float32)
    check_same(other, file, torch.bfloat16)


def test_a_file_may_mix_types(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", **WIDE)
    kinds = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q8_0", "output": "F16", "attn_": "Q4_K"}
    file = write_gguf(folder, tmp_path / "model.gguf", kinds)
    other = save_dequantised(folder, file, tmp_path / "other")
    check_same(other, file, torch.bfloat16)
    stored = {kind for kind, _ in weight_headers(resolve(file)).values()}
    assert stored == {"F32", "F16", "Q8_0", "Q4_K", "Q6_K"}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("Q8_0", "bfloat16"),
        ("Q4_0", "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_the_matrices(kind: str, dtype: str, tmp_path: Path) -> None:
    file = write_gguf(save_checkpoint(tmp_path / "model", **WIDE), tmp_path / "model.gguf", kind)
    assert ModelSpec.from_folder(resolve(file)).dtype == dtype


def test_the_tokenizer_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True)
    file = write_gguf(folder, tmp_path / "model.gguf")
    own, found = (Tokenizer.from_folder(each) for each in (folder, resolve(file)))
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
    assert generation_defaults(resolve(file), 97) == {"temperature": 0.6, "top_k": 20}
    file = write_gguf(tmp_path / "model", file, edit=lambda w: w.add_float32("general.sampling.temp", -1.0))
    foredraft.load(file, device="cpu", max_length=64).close()
    assert f"{file}: temperature is -1.0" in caplog.text and str(cache) not in caplog.text


DEFECTS = [
    ("q and k stay as the file has them", "llama", names.row_order, lambda sound: lambda *_: None, "F32"),
    ("q is read with the heads of k", "llama", names.row_order,
     lambda sound: lambda kind, name, rows, heads, kv: sound(kind, name, rows, kv, kv), "F32"),
    ("Gemma's norms keep the one", "gemma2", names.adds_one, lambda sound: lambda *_: False, "F32"),
    ("high halves first", "qwen2", bits.fields, lambda sound: lambda *given: sound(*given).flip(-2), "Q4_K"),
]  # fmt: skip


@pytest.mark.parametrize("case", DEFECTS, ids=lambda case: case[0])
def test_a_defect_is_caught(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, family, seam, spoiler, kind = case
    folder = save_checkpoint(tmp_path / "model", family, num_key_value_heads=2, **wide(family))
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    other = save_dequantised(folder, file, tmp_path / "other")
    mutant: Mutant = defect(name, seam, spoiler, lambda: check_same(other, file, torch.float32))
    assert_caught(mutant, monkeypatch)


NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")
WHOLE = {"hidden_size": 64, "intermediate_size": 96}  # rows of whole groups of 32


@NEEDS_KERNELS
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize(
    ("kind", "coding"),
    [
        ("Q4_0", Coding(4)),
        ("Q8_0", Coding(8)),
        ("Q4_1", Coding(4, unsigned=True, offsets=True)),
        ("Q5_0", Coding(5)),
        ("Q5_1", Coding(5, unsigned=True, offsets=True)),
        ("IQ4_NL", Coding(4, codebook="iq4")),
        ("MXFP4", Coding(4, codebook="mxfp4")),
        ("Q2_K", Coding(2, group=16, unsigned=True, nested=True, offsets=True)),
        ("Q3_K", Coding(3, group=16, nested=True)),
        ("Q4_K", Coding(4, unsigned=True, nested=True, offsets=True)),
        ("Q5_K", Coding(5, unsigned=True, nested=True, offsets=True)),
        ("Q6_K", Coding(6, group=16, nested=True)),
        ("IQ4_XS", Coding(4, nested=True, codebook="iq4")),
    ],
)
def test_the_kernels_keep_codes(kind: str, coding: Coding, family: str, tmp_path: Path) -> None:
    """A tied head, too."""
    folder = save_checkpoint(tmp_path / "model", family, tie_word_embeddings=True, **wide(family))
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    decoder = load_decoder(resolve(file), dtype=torch.float32, native=True)
    assert all(isinstance(one, NativeCodes) and one.coding == coding for one in decoder.products)
    other = load_decoder(save_dequantised(folder, file, tmp_path / "other"), dtype=torch.float32)
    for one, two in zip(decoder.products, other.products, strict=True):
        assert torch.equal(one.dense(), two.dense())
    assert torch.equal(*(each.embed(torch.arange(each.spec.vocab_size)) for each in (decoder, other)))


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
    folder = save_checkpoint(tmp_path / "model", **wide("llama"))
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "": "Q4_K"}
    file = write_gguf(folder, tmp_path / "model.gguf", kinds)
    decoder = load_decoder(resolve(file), dtype=torch.float32, native=True)
    other = load_decoder(save_dequantised(folder, file, tmp_path / "other"), dtype=torch.float32)
    for one, two in zip(decoder.products, other.products, strict=True):
        assert torch.equal(one.dense(), two.dense())
    layer = decoder.layers[0]
    assert layer.mlp is not None
    qkv = layer.attention.qkv
    assert isinstance(qkv, NativeCodes) and qkv.coding == Coding(6, group=16, nested=True, offsets=True)
    gate_up = layer.mlp.gate_up
    assert isinstance(gate_up, NativeCodes) and gate_up.coding == Coding(8, offsets=True, wide=True)


@NEEDS_KERNELS
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0", "Q3_K", "Q4_K", "IQ4_XS", "IQ2_S"])
def test_greedy_speculation_equals_plain_decoding(kind: str, family: str, tmp_path: Path) -> None:
    keys = {"tokenizer": True, "eos_token_id": None, **wide(family)}
    folder = save_checkpoint(tmp_path / "model", family, **keys)
    draft = save_checkpoint(tmp_path / "draft", family, num_hidden_layers=1, **keys)
    files = [write_gguf(each, each.with_suffix(".gguf"), kind) for each in (folder, draft)]
    params = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    with foredraft.load(
        files[0], draft=files[1], device="cpu", max_length=128, policy="fixed", plan="exit:1"
    ) as llm:
        prompts = ["a b a b a b", "the cat"]
        plain = [output.token_ids for output in llm.generate(prompts, params, drafter="none")]
        for drafter in ("lookup", "draft-model", "layer-skip"):
            outputs = llm.generate(prompts, params, drafter=drafter)
            assert sum(output.stats.drafted for output in outputs) > 0
            assert [output.token_ids for output in outputs] == plain


def test_info_names_the_file_and_its_formats(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tokenizer=True, **WHOLE)
    file = write_gguf(folder, tmp_path / "model.gguf", {"output": "F16", "": "Q8_0"})
    [model] = inspect_models(file, device="cpu").models
    assert model.folder == str(file) and model.quantisation == "gguf, Q8_0"
    assert model.architecture == "LlamaForCausalLM" and model.weights_checked
