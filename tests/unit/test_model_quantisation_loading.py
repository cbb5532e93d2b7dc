"""Whole checkpoints with quantised weights: they load exactly, decode as their expanded twins, and fail by name."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import foredraft
from foredraft import SamplingParams
from foredraft.drafters.kangaroo import adapter_spec, target_hash
from foredraft.errors import CheckpointError, ConfigError
from foredraft.kernels.compilation import library
from foredraft.loading.inspection import inspect_models
from foredraft.model.decoder import Decoder
from foredraft.model.memory import dtype_name
from foredraft.model.quantisation.codes import CodeFormat, Codes
from foredraft.model.quantisation.scheme import Quantisation
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes, NativeLinear
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import layer_tensors, load_decoder, read_tensors, weight_bytes
from foredraft.train.trainers import draft_config
from foredraft.train.training_options import DraftOptions
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_checkpoint, save_variant
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import code_format_of_the_first, scales_of_the_first_dtype
from tests.support.quantising import KINDS, SINGLE, WIDE, edit_config, edit_tensors, quantise

EXPANDED = ("gptq-v2-8",)  # codes of 9 bits
ROUNDED = ("w8a8", "fp8-dynamic", "fp8-square-dynamic")  # inputs, as well
NEEDS_KERNELS = pytest.mark.skipif(library() is None, reason="no kernels")
GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
PROMPTS = torch.arange(3, 35).view(8, 4)
NONE = "(?!)"  # an expression that matches no module
Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"


def saved(folder: Path, name: str, family: str = "llama", **options: Any) -> tuple[Path, Path]:
    if name in WIDE:
        options = {"hidden_size": 128, "intermediate_size": 256} | options
    save_checkpoint(folder, family, **options)
    return folder, quantise(folder, (KINDS | WIDE)[name])


def weights_of(decoder: Decoder) -> list[Tensor]:
    embedding = decoder.embed(torch.arange(decoder.spec.vocab_size))
    return [embedding, *(product.dense() for product in decoder.products)]


def check_same(coded: Path, twin: Path, **options: Any) -> None:
    pairs = zip(
        weights_of(load_decoder(coded, **options)), weights_of(load_decoder(twin, **options)), strict=True
    )
    assert all(torch.equal(one, two) for one, two in pairs)


def logits_of(decoder: Decoder) -> Tensor | None:
    runner = Runner(decoder)
    return runner.forward(runner.new_cache(8, 64), PROMPTS, [0] * 8).logits


def check_near(name: str, one: Tensor | None, two: Tensor | None) -> None:
    """Compare the logits of `PROMPTS` that are computed in two orders.

    An input within the error of such an order from the middle of two integers may become either.
    """
    assert one is not None and two is not None
    off = (one - two).abs().flatten(1).amax(1)
    assert (off.median() if name == "w8a8" else off.max()) < 1e-4


def refusal(folder: Path, *, device: str = "cpu") -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folder, device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "int4"}, "weights is 'int4', but .* is quantised already"),
        pytest.param({"drafter": "low-bit"}, "but the target has 4 bits itself", marks=NEEDS_KERNELS),
    ],
)
def test_quantised_weights_are_not_quantised_again(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    coded, _ = saved(tmp_path / "model", "w4", tokenizer=True)
    with pytest.raises(ConfigError, match=says):
        foredraft.load(coded, device="cpu", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_loads_as_its_expanded_twin(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    coded, twin = saved(tmp_path / "model", name, dtype=dtype)
    assert load_decoder(coded).dtype == dtype
    check_same(coded, twin)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_families_with_biases_head_norms_and_tied_heads(tmp_path: Path, family: str) -> None:
    coded, twin = saved(tmp_path / "model", "gptq-zeros", family, dtype=torch.bfloat16, head_dim=16)
    for native in (False, True):
        check_same(coded, twin, native=native)


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    coded, twin = saved(tmp_path / "model", "w4-zeros")
    tensors = load_file(coded / SINGLE)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}  # parts of a weight lie apart
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, coded / shard)
    (coded / SINGLE).unlink()
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (coded / "model.safetensors.index.json").write_text(json.dumps(index))
    check_same(coded, twin)


def test_a_quantised_head_is_read_and_a_tied_one_stays_the_embedding(tmp_path: Path) -> None:
    whole = {"quantization_config": {**KINDS["w4"].config, "ignore": []}}
    coded, twin = saved(tmp_path / "model", "w4")
    parts, values = KINDS["w4"].pack(load_file(coded / SINGLE)["lm_head.weight"])
    edit_tensors(coded, {"lm_head.weight": None} | {f"lm_head.{name}": part for name, part in parts.items()})
    edit_tensors(twin, {"lm_head.weight": values})
    edit_config(coded, whole)
    check_same(coded, twin)
    tied = save_variant(tmp_path / "tied", "llama-gqa-tied")
    twin = quantise(tied, KINDS["w4"])
    edit_config(tied, whole)
    check_same(tied, twin)
    edit_tensors(tied, {"lm_head.weight_packed": torch.zeros(97, 8, dtype=torch.int32)})
    assert "tensor lm_head.weight_packed in model.safetensors is not part of" in refusal(tied)


def mixed(folder: Path, skipped: str = "v_proj") -> tuple[Path, Path]:
    """Save a checkpoint whose keys have 8 bits by channel with scales in float32, its values, or what matches
    `skipped`, no quantisation, and the rest 4 bits with scales in bfloat16."""
    save_checkpoint(folder)
    twin = quantise(folder, KINDS["w4"], skipped=f"k_proj|{skipped}")
    tensors = load_file(folder / SINGLE)
    for name in [name for name in tensors if "k_proj.weight" in name]:
        parts, values = KINDS["w8-channel"].pack(tensors[name])
        parts["weight_scale"] = parts["weight_scale"].float() * 0.75  # has more digits than bfloat16
        module = name.removesuffix(".weight")
        edit_tensors(folder, {name: None} | {f"{module}.{suffix}": part for suffix, part in parts.items()})
        edit_tensors(twin, {name: values * 0.75})
    config: dict[str, Any] = {**KINDS["w4"].config, "ignore": ["lm_head", f"re:.*{skipped}"]}
    keys = {"targets": ["re:.*k_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
    config["config_groups"] = {**config["config_groups"], "keys": keys}
    edit_config(folder, {"quantization_config": config})
    return folder, twin


@pytest.mark.parametrize("name", [*KINDS, *WIDE])
@NEEDS_KERNELS
def test_the_kernels_keep_codes(tmp_path: Path, name: str) -> None:
    """Their products are those of the expanded weights, which round in float32 only in another order."""
    coded, twin = saved(tmp_path / "model", name)
    decoder, stays_coded = load_decoder(coded, native=True), name not in EXPANDED
    layers = [product for product in decoder.products if product is not decoder.output]
    assert all(isinstance(product, NativeCodes) is stays_coded for product in layers)
    check_same(coded, twin, native=True)
    check_near(name, logits_of(decoder), logits_of(load_decoder(coded)))
    kept = sum(product.weight.nbytes for product in decoder.products)  # type: ignore[attr-defined]
    spec, cpu = ModelSpec.from_folder(coded), torch.device("cpu")
    whole = 4 * sum(math.prod(product.shape) for product in decoder.products)
    others = weight_bytes(replace(spec, quantisation=None), cpu, torch.float32) - whole
    assert weight_bytes(spec, cpu, torch.float32, native=True) == pytest.approx(kept + others, rel=0.05)


@NEEDS_KERNELS
def test_a_fused_layer_is_coded_where_all_its_parts_are(tmp_path: Path) -> None:
    coded, twin = mixed(tmp_path / "in part")
    check_same(coded, twin, native=True)
    assert not isinstance(load_decoder(coded, native=True).layers[0].attention.qkv, NativeCodes)
    coded, twin = mixed(tmp_path / "whole", NONE)
    check_same(coded, twin, native=True)
    joined = load_decoder(coded, native=True).layers[0].attention.qkv
    assert isinstance(joined, NativeCodes) and joined.code_format == CodeFormat(8), "keys have 8 bits"


@pytest.mark.heavy
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=NEEDS_KERNELS), False])
@pytest.mark.parametrize("name", ["gptq-order", *ROUNDED])
def test_greedy_speculation_equals_plain_decoding(tmp_path: Path, name: str, kernels: bool) -> None:
    options: dict[str, Any] = {"tokenizer": True, "eos_token_id": None}
    coded, _ = saved(tmp_path / "big", name, seed=1, **options)
    draft, _ = saved(tmp_path / "small", name, seed=2, num_hidden_layers=1, **options)
    options = {"device": "cpu", "kernels": kernels, "policy": "fixed", "max_length": 64}
    drafters = ["lookup", "draft-model", "layer-skip"]
    if kernels and name in ROUNDED:
        options["drafter"] = "low-bit"
        drafters.append("low-bit")
    with foredraft.load(coded, draft=draft, plan="skip:attn=1/mlp=0", **options) as llm:
        ids = {}
        for drafter in ("none", *drafters):
            outputs = llm.generate(["a b a b a b", "the cat", "one two three"], GREEDY, drafter=drafter)
            assert (drafter == "none") == (sum(output.stats.drafted for output in outputs) == 0)
            ids[drafter] = [output.token_ids for output in outputs]
    assert all(ids[drafter] == ids["none"] for drafter in drafters)


def test_drafters_of_a_quantised_target_are_not_quantised(tmp_path: Path) -> None:
    coded, twin = saved(tmp_path / "model", "gptq", tokenizer=True)
    spec = ModelSpec.from_folder(coded)
    assert adapter_spec(spec) == adapter_spec(ModelSpec.from_folder(twin))
    adapter = save_adapter(twin, tmp_path / "adapter")
    edit_config(adapter, {"target_hash": target_hash(coded)})
    foredraft.load(coded, drafter="kangaroo", adapter=adapter, device="cpu", max_length=128).close()
    options = DraftOptions(data=[], out=tmp_path / "draft", from_layers=(0, 2))
    one, two = (
        draft_config(json.loads((folder / "config.json").read_text()), spec, options)
        for folder in (coded, twin)
    )
    assert one == two


@pytest.mark.parametrize("name", ["w4-zeros", "gptq-order"])
def test_tensors_are_read_expanded(tmp_path: Path, name: str) -> None:
    coded, twin = saved(tmp_path / "model", name)
    pairs = [[read_tensors(folder, lambda name: True), layer_tensors(folder, 1)] for folder in (coded, twin)]
    for one, two in zip(*pairs, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_modules_are_expanded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, _ = saved(tmp_path / "model", "w4")
    expand_into, made, alive = Codes.expand_into, list[weakref.ref[Tensor]](), list[int]()

    def watched(self: Codes, expanded: Tensor) -> None:
        alive.append(sum(reference() is not None for reference in made))
        expand_into(self, expanded)
        made.append(weakref.ref(expanded._base))

    monkeypatch.setattr(Codes, "expand_into", watched)
    load_decoder(coded)
    assert len(alive) == 3 * 7
    assert max(alive) <= 1


@pytest.mark.parametrize("name", ["gptq-v2-8", "auto-round", "awq", "w4", "w8a8", "fp8-blocks"])
def test_info_names_the_format_and_expands_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, twin = saved(tmp_path / "model", name)
    monkeypatch.setattr(Codes, "expand_into", lambda *given: pytest.fail("expanded"))
    [model], [plain] = (inspect_models(folder, device="cpu").models for folder in (coded, twin))
    assert model.weights_checked
    assert model.quantisation is not None and plain.quantisation is None
    assert model.quantisation.startswith(str(KINDS[name].config["quant_method"]))
    assert model.parameters == plain.parameters
    stays_coded = name not in EXPANDED
    assert (model.weight_bytes[32] < plain.weight_bytes[32]) is (stays_coded and library() is not None)


def test_the_hash_of_a_target_tells_scales_apart(tmp_path: Path) -> None:
    coded, _ = saved(tmp_path / "model", "fp8-channel")
    before, name = target_hash(coded), f"{Q}.weight_scale"
    edit_tensors(coded, {name: load_file(coded / SINGLE)[name] * 2})
    assert target_hash(coded) != before
    edit_tensors(coded, {"scalar": torch.tensor(1.0)})
    assert target_hash(coded) != before


def test_zero_biases_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    coded, twin = saved(tmp_path / "model", "gptq")
    edit_tensors(coded, {f"{Q}.bias": torch.zeros(64, dtype=torch.float16)})
    check_same(coded, twin)
    edit_tensors(coded, {f"{Q}.bias": torch.ones(64, dtype=torch.float16)})
    assert f"tensor {Q}.bias" in refusal(coded)
    edit_tensors(twin, {f"{Q}.bias": torch.zeros(64)})
    assert f"tensor {Q}.bias" in refusal(twin)


SUFFIXES = [
    ("gptq-order", "g_idx"), ("auto-round", "qzeros"), ("auto-round-awq", "qzeros"), ("fp8-square", "weight_scale"),
    ("gptq", "qweight"), ("gptq", "qzeros"), ("gptq", "scales"), ("awq", "qweight"), ("awq", "qzeros"),
    ("awq", "scales"), ("w4-zeros", "weight_packed"), ("w4-zeros", "weight_scale"), ("w4-zeros", "weight_shape"),
    ("w4-zeros", "weight_zero_point"), ("int8", "weight"), ("int8", "weight_scale"), ("fp8-channel", "weight"),
    ("fp8-channel", "weight_scale"), ("fp8-blocks", "weight"), ("fp8-blocks", "weight_scale_inv"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "suffix"), SUFFIXES)
def test_a_missing_misshapen_or_mistyped_tensor_is_named(tmp_path: Path, name: str, suffix: str) -> None:
    coded, _ = saved(tmp_path / "model", name)
    tensor = load_file(coded / SINGLE)[f"{DOWN}.{suffix}"]
    edit_tensors(coded, {f"{DOWN}.{suffix}": tensor.double()})
    assert f"tensor {DOWN}.{suffix} is stored as F64, but config.json implies" in refusal(coded)
    edit_tensors(coded, {f"{DOWN}.{suffix}": torch.cat([tensor, tensor[:1]])})
    assert f"tensor {DOWN}.{suffix} has shape" in refusal(coded, device="meta")
    edit_tensors(coded, {f"{DOWN}.{suffix}": None})
    assert f"tensor {DOWN}.{suffix} is missing" in refusal(coded)


def scheme(name: str, **keys: Any) -> dict[str, Any]:
    """Return the keys of a config.json with the scheme of a kind, some keys of it changed."""
    return {"quantization_config": {**KINDS[name].config, **keys}}


# kind -> keys of config.json and tensors that contradict each other, and what is said
GROUPS_OF_48 = "q_proj has 64 columns, which groups of 48 do not divide"
W4_OF_48 = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 48}}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Tensor], str]] = [
    ("w4", {}, {f"{DOWN}.weight_g_idx": torch.zeros(96)}, f"{DOWN}.weight_g_idx in {SINGLE} is not part of"),
    ("w4", {}, {f"{DOWN}.weight_shape": torch.tensor([64, 95])}, "but config.json implies [64, 96]"),
    ("w4", scheme("w4", config_groups={"group_0": W4_OF_48}), {}, GROUPS_OF_48),
    ("gptq", scheme("gptq", group_size=48), {}, GROUPS_OF_48),
    ("awq", scheme("awq", group_size=48), {}, GROUPS_OF_48),
    ("gptq-zeros", scheme("gptq-zeros", sym=True), {}, "other than 8, but config.json has sym true"),
    ("awq", scheme("awq", zero_point=False), {}, "other than 8, but config.json has none"),
    ("gptq", {"intermediate_size": 100}, {}, "gate_proj has 100 rows and 64 columns, but GPTQ packs 8 at a"),
    ("awq", {"intermediate_size": 100}, {}, "gate_proj has 100 rows, but AWQ packs 8 at a time"),
    ("int8", {"quantization_config": None}, {}, "stored as I8, but config.json implies BF16 or F16"),
    ("int8", {}, {f"{Q}.weight": torch.zeros(64, 64)}, "is stored as F32, but config.json implies I8"),
]


@pytest.mark.parametrize(("name", "keys", "tensors", "said"), REFUSED, ids=[case[3][:40] for case in REFUSED])
def test_a_config_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Tensor | None], said: str
) -> None:
    coded, _ = saved(tmp_path / "model", name)
    edit_config(coded, keys)
    edit_tensors(coded, tensors)
    assert said in refusal(coded)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "most"), [("gptq-zeros", 15), ("gptq-v2-8", 255)])
def test_a_stored_zero_that_libraries_read_in_two_ways_is_refused(
    tmp_path: Path, name: str, most: int, device: str
) -> None:
    coded, _ = saved(tmp_path / "model", name)
    zeros = load_file(coded / SINGLE)[f"{Q}.qzeros"]
    zeros[0, 0] |= most << 8
    edit_tensors(coded, {f"{Q}.qzeros": zeros})
    config = {**KINDS[name].config, "checkpoint_format": "gptq"}
    edit_config(coded, {"quantization_config": config})
    message = refusal(coded, device=device)
    assert f"tensor {Q}.qzeros has a stored zero point of {most}, which libraries read in two ways" in message
    edit_config(coded, {"quantization_config": {**config, "checkpoint_format": "gptq_v2"}})
    load_decoder(coded, device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_groups_of_other_sizes_than_the_configs_are_refused(tmp_path: Path, device: str) -> None:
    coded, _ = saved(tmp_path / "model", "gptq")
    groups = load_file(coded / SINGLE)[f"{Q}.g_idx"]
    beyond = "names a group beyond 0 to 1"
    for group, says in (
        (1, "gives group 0 31 columns, but config.json implies 32"),
        (2, beyond),
        (-1, beyond),
    ):
        groups[0] = group
        edit_tensors(coded, {f"{Q}.g_idx": groups})
        assert f"tensor {Q}.g_idx {says}" in refusal(coded, device=device)


def ordered_apart(folder: Path) -> tuple[Path, Path]:
    """Save a checkpoint with act-order whose keys have columns in another order than queries and values."""
    coded, twin = saved(folder, "gptq-order")
    for name, weight in load_file(twin / SINGLE).items():
        if "k_proj" in name:
            parts, values = KINDS["gptq-order"].pack(weight.flip(1))
            module = name.removesuffix(".weight")
            apart = {"g_idx": parts["g_idx"].flip(0), "qweight": flipped(parts["qweight"])}
            edit_tensors(
                coded, {f"{module}.{suffix}": part.contiguous() for suffix, part in (parts | apart).items()}
            )
            edit_tensors(twin, {name: values.flip(1)})
    return coded, twin


def flipped(words: Tensor) -> Tensor:
    """Return the words of 4-bit numbers [K, N] whose K numbers are in the opposite order."""
    bytes = words.T.contiguous().view(torch.uint8).flip(1)
    return ((bytes >> 4) | (bytes << 4)).view(torch.int32).T.contiguous()


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_whose_columns_are_ordered_differently_are_expanded(
    tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    coded, twin = ordered_apart(tmp_path / "model")
    check_same(coded, twin, native=True, dtype=dtype)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"3 linear layers are expanded to {dtype_name(dtype)}, 0.000 GB: their parts share inputs"
    )
    assert "(the first: model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj," in line
    layer = load_decoder(coded, native=True, dtype=dtype).layers[0]
    assert layer.mlp is not None
    assert type(layer.attention.qkv) is NativeLinear and isinstance(layer.mlp.gate_up, NativeCodes)
    caplog.clear()
    check_same(coded, twin, dtype=dtype)  # without the kernels all is expanded
    assert not caplog.records


@pytest.mark.parametrize(
    "name", ["w4", "w4-zeros", "w8-channel", "int8", "fp8-channel", "fp8-square", *ROUNDED, "fp8-blocks"]
)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """transformers expands the weights with the code of compressed-tensors, or its own for FP8 blocks."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate" if name == "fp8-blocks" else "compressed_tensors")
    coded, _ = saved(tmp_path / "model", name)
    scales = {key: value for key, value in load_file(coded / SINGLE).items() if key.endswith("_scale")}
    edit_tensors(
        coded, {key: value.float() for key, value in scales.items()}
    )  # in which the library multiplies
    shutil.copytree(coded, theirs := tmp_path / "theirs")
    if name not in ROUNDED:
        edit_config(theirs, {"quantization_config": {**KINDS[name].config, "dequantize": True}})
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    with torch.no_grad():
        check_near(name, logits_of(load_decoder(coded)), model(PROMPTS).logits)


Function = Callable[..., Any]


def keys_like_queries(format_of: Function) -> Function:
    return lambda self, module: format_of(self, re.sub("[kv]_proj", "q_proj", module))


def parts_unjoined(expand_into: Function) -> Function:
    def mutated(self: Codes, expanded: Tensor) -> None:
        expand_into(self, expanded)
        expanded.copy_(expanded.roll(1, dims=0))

    return mutated


def parts_in_another_order(joined: Function) -> Function:
    return lambda parts: joined(parts[::-1])


Made = Callable[[Path], tuple[Path, Path]]
COPIED = functools.partial(mixed, skipped=NONE)
# what is made, whether the kernels keep its codes, in which dtype, and what is wrong
FLOAT, SHORT = torch.float32, torch.bfloat16
IN_PARTS = {
    "format of the codes": (CodeFormat.of_all, code_format_of_the_first),
    "scales": (Codes.joined, scales_of_the_first_dtype),
    "order": (Codes.joined, parts_in_another_order),
}
DEFECTS: list[tuple[str, Made, bool, torch.dtype, Any, Any]] = [
    ("formats taken for one", mixed, False, FLOAT, Quantisation.format_of, keys_like_queries),
    ("rows shifted", mixed, False, FLOAT, Codes.expand_into, parts_unjoined),
    ("order of the first part", ordered_apart, True, FLOAT, Codes.can_join, lambda sound: lambda parts: True),
    *((name, COPIED, True, dtype, *of) for dtype in (FLOAT, SHORT) for name, of in IN_PARTS.items()),
]


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("name", "made", "native", "dtype", "point", "mutation"), DEFECTS, ids=[case[0] for case in DEFECTS]
)
def test_a_planted_defect_is_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    made: Made,
    native: bool,
    dtype: torch.dtype,
    point: Any,
    mutation: Any,
) -> None:
    check = functools.partial(check_same, *made(tmp_path / "model"), native=native, dtype=dtype)
    check()
    raises = CheckpointError if point is Quantisation.format_of else AssertionError
    assert_caught(defect(name, point, mutation, check, raises), monkeypatch)
