"""`quantization_config` is read as strictly as every other key: what is not understood is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CheckpointError
from foredraft.model.quantisation import Quantisation
from foredraft.model.quantisation.gptq import GPTQFormat
from foredraft.model.spec import ModelSpec
from tests.support.checkpoints import LLAMA
from tests.support.quantising import KINDS, by_token

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
LAYER = "model.layers.1"


def read(config: Any, key: str = "quantization_config") -> Quantisation | None:
    return ModelSpec.from_hf({**CONFIG, key: config}).quantisation


def scheme(config: Any, key: str = "quantization_config") -> Quantisation:
    found = read(config, key)
    assert found is not None
    return found


def refusal(config: Any, key: str = "quantization_config") -> str:
    with pytest.raises(CheckpointError) as caught:
        read(config, key)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(name: str, **keys: Any) -> dict[str, Any]:
    return {**KINDS[name].config, **keys}


def group(**keys: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors, its group of modules with other keys."""
    config: dict[str, Any] = copy.deepcopy(dict(KINDS["w4"].config))
    config["config_groups"]["group_0"].update(keys)
    return config


def weights(name: str = "w4", **keys: Any) -> dict[str, Any]:
    """Return a config of compressed-tensors, the weights of its group with other keys."""
    config: dict[str, Any] = copy.deepcopy(dict(KINDS[name].config))
    config["config_groups"]["group_0"]["weights"].update(keys)
    return config


def test_a_plain_config_has_no_scheme() -> None:
    assert ModelSpec.from_hf(CONFIG).quantisation is None
    assert read(None) is None


def test_a_spec_with_a_scheme_is_hashable_and_comparable() -> None:
    one, two = (ModelSpec.from_hf({**CONFIG, "quantization_config": changed("gptq")}) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != ModelSpec.from_hf(CONFIG)


def test_the_old_key_of_compressed_tensors_is_read() -> None:
    old = {key: value for key, value in KINDS["w4"].config.items() if key != "quant_method"}
    assert read(old, "compression_config") == read(KINDS["w4"].config)
    both = {**CONFIG, "quantization_config": changed("w4"), "compression_config": changed("w4")}
    assert ModelSpec.from_hf(both).quantisation == read(changed("w4"))
    with pytest.raises(CheckpointError, match="compression_config is .*; quantization_config differs"):
        ModelSpec.from_hf({**both, "compression_config": changed("w4", ignore=[])})


BNB = {"quant_method": "bitsandbytes"}
BY_TOKEN = by_token("int")
NEIGHBOURS = "a token would depend on its neighbours"
REFUSED: list[tuple[Any, str]] = [
    # methods
    ("gptq", "config.json: quantization_config is 'gptq'; it must be a JSON object or null"),
    (
        {"bits": 4},
        "quantization_config: quant_method is missing; supported are auto-round, awq, compressed-tensors",
    ),
    ({"quant_method": "hqq"}, "quant_method is 'hqq'; supported are auto-round, awq"),
    ({"quant_method": ["gptq"]}, "quant_method is ['gptq']"),
    (
        {**BNB, "load_in_8bit": True},
        f"'bitsandbytes' with load_in_8bit picks outlier columns over all rows of a pass, so {NEIGHBOURS};"
        " give the 16-bit model that it was made from, with weights='int8'",
    ),
    (
        {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "'bitsandbytes' with bnb_4bit_quant_type 'nf4' is not supported; give the 16-bit model that it was made from,"
        " with weights='int4'",
    ),
    # GPTQ
    (changed("gptq", desc_act="yes"), "desc_act is 'yes'; it must be true or false"),
    (
        changed("gptq", act_bits=8),
        "act_bits is 8; export models with quantised activations in the format llm_compressor",
    ),
    (changed("gptq", data_type="mx_fp"), "data_type is 'mx_fp'; supported are int"),
    (
        changed("gptq", dynamic={"-:.*down.*": {}}),
        "dynamic is {'-:.*down.*': {}}; settings of single modules",
    ),
    (changed("gptq", bits=3), "bits is 3; supported are 4, 8"),
    (changed("gptq", bits=4.0), "bits is 4.0"),
    (changed("gptq", bits=True), "bits is True"),
    (changed("gptq", group_size=0), "group_size is 0"),
    (changed("gptq", group_size=None), "group_size is None"),
    (changed("gptq", sym="yes"), "sym is 'yes'"),
    (
        changed("gptq", checkpoint_format="marlin"),
        "checkpoint_format is 'marlin'; supported are gptq, gptq_v2",
    ),
    (changed("gptq", is_marlin_format=True), "is_marlin_format is True"),
    (changed("gptq", pack_dtype="int8"), "pack_dtype is 'int8'"),
    (changed("gptq", modules_in_block_to_quantize=["q_proj"]), "modules_in_block_to_quantize is ['q_proj']"),
    (changed("gptq", rotation="hadamard"), "rotation = 'hadamard' is not known"),
    # AWQ
    (changed("awq", version="gemv"), "version is 'gemv'; only 'gemm' is supported"),
    (changed("awq", bits=8), "bits is 8"),
    (changed("awq", w_bit=8), "w_bit is 8; bits is another number"),
    (changed("awq", q_group_size=64), "q_group_size is 64; group_size is another number"),
    (changed("awq", backend="llm-awq"), "backend is 'llm-awq'"),
    (changed("awq", zero_point=1), "zero_point is 1"),
    (changed("awq", sym=True), "sym is True; zero_point is True; they must differ"),
    (changed("awq", lm_head=True), "lm_head is True"),
    (changed("awq", modules_to_not_convert="lm_head"), "modules_to_not_convert is 'lm_head'"),
    (
        changed("awq", act_bits=8),
        "act_bits is 8; export models with quantised activations in the format llm_compressor",
    ),
    (changed("awq", to_quant_block_names="model.layers.1"), "to_quant_block_names is 'model.layers.1'"),
    (changed("awq", smooth=0.5), "smooth = 0.5 is not known"),
    # FP8 by block
    (
        changed("fp8-blocks", activation_scheme="static"),
        "activation_scheme is 'static'; fixed scales of activations",
    ),
    (
        changed("fp8-blocks", weight_block_size=None),
        f"weight_block_size is None; without blocks, activations have one scale in a pass, so {NEIGHBOURS}",
    ),
    (changed("fp8-blocks", weight_block_size=[64, 64]), "weight_block_size is [64, 64]; only [128, 128]"),
    (changed("fp8-blocks", fmt="e5m2"), "fmt is 'e5m2'"),
    (changed("fp8-blocks", scale_fmt="ue8m0"), "scale_fmt is 'ue8m0'"),
    (changed("fp8-blocks", modules_to_convert=["model.embed_tokens"]), "modules_to_convert is"),
    (changed("fp8-blocks", modules_to_not_convert=[], ignored_layers=[]), "ignored_layers is []"),
    (changed("fp8-blocks", per_tensor=True), "per_tensor = True is not known"),
    # AutoRound
    (
        changed("auto-round", packing_format="auto_round:llm_compressor"),
        "packing_format is 'auto_round:llm_compressor'",
    ),
    (
        changed("auto-round", packing_format="auto_round:fp8_static"),
        "packing_format is 'auto_round:fp8_static'",
    ),
    (
        changed("auto-round", packing_format="mlx"),
        "packing_format is 'mlx'; supported are auto_round:auto_gptq",
    ),
    (changed("auto-round", bits=2), "bits is 2; supported are 4, 8"),
    (changed("auto-round", packing_format="auto_round:auto_awq", bits=8), "bits is 8; supported are 4"),
    (changed("auto-round", group_size=[128, 128]), "group_size is [128, 128]"),
    (changed("auto-round", sym=1), "sym is 1"),
    (changed("auto-round", data_type="nv_fp"), "data_type is 'nv_fp'; supported are int"),
    (
        changed("auto-round", act_bits=8),
        "act_bits is 8; export models with quantised activations in the format llm",
    ),
    (changed("auto-round", super_bits=6), "super_bits = 6 is not known"),
    (changed("auto-round", static_kv_dtype="fp8"), "static_kv_dtype is 'fp8'; a quantised KV cache"),
    (changed("auto-round", rotation_config={"name": "hadamard"}), "rotation_config is {'name': 'hadamard'}"),
    (
        changed("auto-round", block_name_to_quantize="visual.blocks"),
        "block_name_to_quantize is 'visual.blocks'",
    ),
    (
        changed("auto-round", block_name_to_quantize=[["model.layers.0", 1]]),
        "it must name model.layers or blocks of",
    ),
    (changed("auto-round", block_name_to_quantize=[]), "block_name_to_quantize is []"),
    (changed("auto-round", extra_config=["lm_head"]), "extra_config is ['lm_head']"),
    (changed("auto-round", extra_config={"lm_head": 4}), "'lm_head' must be a JSON object"),
    (
        changed("auto-round", extra_config={"lm_head": {"bits": 3}}),
        "'lm_head': bits is 3; supported are 4, 8, 16, 32",
    ),
    (changed("auto-round", extra_config={"lm_head": {"act_bits": 8}}), "'lm_head': act_bits is 8"),
    (
        changed("auto-round", extra_config={"lm_head": {"new": 1}}),
        "extra_config, 'lm_head': new = 1 is not known",
    ),
    (changed("auto-round", extra_config={".*(": {"bits": 8}}), "'.*(' is not a regular expression"),
    (changed("auto-round", extra_config={"(.+)+x": {"bits": 8}}), "'(.+)+x' may take for ever to match"),
    # compressed-tensors
    (
        changed("w4", kv_cache_scheme={"num_bits": 8}),
        "kv_cache_scheme is {'num_bits': 8}; a quantised KV cache is not supported",
    ),
    (
        changed("w4", sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config is {'format': 'sparse-24-bitmask'}",
    ),
    (changed("w4", transform_config={"config_groups": {}}), "transform_config is"),
    (
        changed("w4", quantization_status="calibration"),
        "quantization_status is 'calibration'; supported are compressed",
    ),
    (changed("w4", format="marlin-24"), "format is 'marlin-24'; supported are pack-quantized"),
    (changed("w4", config_groups={"W4A16": ["Linear"]}), "'W4A16' must be a JSON object"),
    (changed("w4", config_groups={}), "config_groups is {}"),
    (changed("w4", ignore="lm_head"), "ignore is 'lm_head'"),
    (changed("w4", ignore=["re:("]), "'re:(' is not a regular expression"),
    (changed("w4", ignore=["re:(.+)+x"]), "'re:(.+)+x' may take for ever to match; repeat no groups"),
    (changed("w4", ignore=["re:" + ".*" * 9 + "x"]), "may take for ever to match"),
    (group(targets=["re:(q|k){9}x"]), "'re:(q|k){9}x' may take for ever to match"),
    (changed("w4", scheme="new"), "scheme = 'new' is not known"),
    (group(input_activations=8), "'group_0': input_activations is 8; it must be a JSON object or null"),
    (group(input_activations={**BY_TOKEN, "strategy": "tensor"}), NEIGHBOURS),
    (group(input_activations={**BY_TOKEN, "strategy": None}), NEIGHBOURS),
    (group(input_activations={**BY_TOKEN, "strategy": "group"}), "strategy is 'group'; supported are token"),
    (
        group(input_activations={**by_token("float"), "strategy": "group", "group_size": 64}),
        "input_activations: group_size is 64; supported are 128",
    ),
    (
        group(input_activations={**by_token("float"), "strategy": "group"}),
        "group_size is None; supported are 128",
    ),
    (
        group(input_activations={**by_token("float"), "group_size": 128}),
        "input_activations: group_size is 128; supported are null",
    ),
    (
        group(input_activations={**BY_TOKEN, "dynamic": False}),
        "fixed scales of activations are not supported",
    ),
    (group(input_activations={**BY_TOKEN, "dynamic": "local"}), "input_activations: dynamic is 'local'"),
    (
        group(input_activations={**BY_TOKEN, "num_bits": 4}),
        "input_activations: num_bits is 4; supported are 8",
    ),
    (group(input_activations={**BY_TOKEN, "symmetric": False}), "input_activations: symmetric is False"),
    (group(input_activations={**BY_TOKEN, "group_size": 128}), "input_activations: group_size is 128"),
    (group(input_activations={**BY_TOKEN, "extra": 1}), "input_activations: extra = 1 is not known"),
    (group(output_activations=BY_TOKEN), "output_activations is"),
    (group(targets=["Embedding"]), "of the classes of modules only Linear and Conv1D are supported"),
    (group(targets=[]), "targets is []; it must name modules"),
    (group(weights=None), "weights is None"),
    (group(extra=1), "extra = 1 is not known"),
    (weights(num_bits=3), "weights: num_bits is 3; supported are 4, 8"),
    (weights(type="float"), "type is 'float'; supported are int"),
    (weights(actorder="group"), "actorder is 'group'"),
    (weights(dynamic=True), "dynamic is True"),
    (weights(strategy="block"), "strategy is 'block'; supported are channel, group"),
    (
        weights("fp8-channel", strategy="block", block_structure=[64, 64]),
        "block_structure is [64, 64]; supported are [128, 128]",
    ),
    (weights("fp8-channel", strategy="block"), "block_structure is missing; supported are [128, 128]"),
    (weights("fp8-channel", block_structure=[128, 128]), "block_structure is [128, 128]; supported are null"),
    (weights(strategy="tensor"), "strategy is 'tensor'"),
    (weights(strategy="channel"), "group_size is 32; it does not fit the strategy 'channel'"),
    (weights(group_size=None), "group_size is None; it does not fit the strategy 'group'"),
    (weights(scale_dtype="torch.uint8"), "scale_dtype is 'torch.uint8'"),
    (weights(zeros="float"), "zeros = 'float' is not known"),
    (weights("int8", num_bits=4), "num_bits is 4; supported are 8"),
    (
        weights("fp8-channel", strategy="group", group_size=32),
        "strategy is 'group'; supported are channel, block, tensor",
    ),
    (weights("fp8-channel", symmetric=False), "symmetric is False"),
    (weights("fp8-channel", type="int"), "type is 'int'; supported are float"),
]


@pytest.mark.parametrize(
    ("config", "named"), REFUSED, ids=[f"{at}-{named[:60]}" for at, (_, named) in enumerate(REFUSED)]
)
def test_a_refusal_names_key_value_and_remedy(config: Any, named: str) -> None:
    message = refusal(config)
    assert message.startswith("config.json")
    assert named in message
    assert ";" in message


@pytest.mark.parametrize("name", KINDS)
def test_an_unknown_key_is_refused_in_every_method(name: str) -> None:
    assert "novelty = 3 is not known" in refusal(changed(name, novelty=3))
    read(changed(name, novelty=None))


def test_harmless_keys_of_published_checkpoints_are_accepted() -> None:
    made = {
        "model_name_or_path": None, "model_file_base_name": "model", "damp_percent": 0.01, "static_groups": False,
        "is_marlin_format": False, "dataset": "c4", "tokenizer": None, "use_exllama": True, "meta": {"mse": 0.0},
        "pack_dtype": "int32", "dynamic": {}, "format": "gptq", "method": "gptq", "act_group_aware": True,
    }  # fmt: skip
    assert read(changed("gptq", **made)) == read(changed("gptq"))
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "do_fuse": False}
    assert read({**old, "backend": "autoawq", "modules_to_not_convert": None}) == read(changed("awq"))
    assert read(weights(observer="mse", observer_kwargs={}, zp_dtype="torch.int8")) == read(changed("w4"))
    assert read(weights(strategy=None, type="int")) == read(changed("w4"))


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen 2 GPTQ": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
        "group_size": 128, "max_input_length": None, "model_seqlen": None,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
        "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True,
    },
    "GPTQModel": {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "lm_head": False,
        "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:2.2.0"]}, "pack_dtype": "int32",
        "quant_method": "gptq", "sym": True,
    },
    "AWQ of transformers": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
        "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq",
        "version": "gemm", "zero_point": True,
    },
    "AutoRound": {
        "autoround_version": "0.13.0", "bits": 4, "data_type": "int", "enable_quanted_input": False,
        "extra_config": {
            "lm_head": {"bits": 16, "data_type": "float"},
            "model.layers.0.input_layernorm": {"bits": 16, "data_type": "float"},
        },
        "group_size": 128, "iters": 0, "low_gpu_mem_usage": True, "model_free": True,
        "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True,
    },
    "GPTQ by AutoRound": {
        "act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True,
        "amp": True, "autoround_version": "0.5.1", "batch_size": 8, "bits": 4, "damp_percent": 0.01,
        "data_type": "int", "desc_act": False, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False,
        "enable_quanted_input": True, "gradient_accumulate_steps": 1, "group_size": 128, "iters": 1000,
        "low_gpu_mem_usage": True, "lr": 0.001, "minmax_lr": 0.001, "nsamples": 512, "quant_method": "gptq",
        "scale_dtype": "torch.float16", "seqlen": 2048, "super_bits": None, "super_group_size": None,
        "sym": True, "to_quant_block_names": None, "true_sequential": False,
    },
    "AWQ by AutoRound": {
        "autoround_version": "0.16.1", "bits": 4, "data_type": "int", "enable_quanted_input": False,
        "group_size": 128, "modules_to_not_convert": ["lm_head"], "provider": "auto-round", "quant_method": "awq",
        "sym": False, "to_quant_block_names": "model.layers", "version": "gemm", "zero_point": True,
    },
    "FP8 by block": {
        "config_groups": {"group_0": {
            "input_activations": {
                "actorder": None, "block_structure": None, "dynamic": True, "group_size": 128, "num_bits": 8,
                "observer": None, "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "float",
            },
            "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": [128, 128], "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "static_minmax", "observer_kwargs": {}, "strategy": "block", "symmetric": True,
                "type": "float",
            },
        }},
        "format": "float-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
    "W4A16": {
        "config_groups": {"group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": "weight", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
                "observer": "mse", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }},
        "format": "pack-quantized", "global_compression_ratio": 1.89, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen",
    },
    "Qwen 3 FP8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_as_published_checkpoints_have_them_are_read(name: str) -> None:
    found = scheme(PUBLISHED[name])
    assert found.format_of(f"{LAYER}.mlp.gate_proj") is not None
    assert found.format_of("model.layers.0.mlp.gate_proj") is not None
    assert found.format_of("lm_head") is None
    assert "in groups of 128" in found.described or "128 x 128" in found.described
    assert ("activations in FP8 by groups of 128" in found.described) is (name == "FP8 by block")


def test_gptq_has_the_zero_points_of_its_checkpoint_format() -> None:
    found = scheme(changed("gptq", checkpoint_format="gptq_v2")).format_of(LAYER)
    assert found == GPTQFormat(4, 32, symmetric=True, less_one=False)
    absent = {key: value for key, value in KINDS["gptq"].config.items() if key != "checkpoint_format"}
    assert scheme(absent).format_of(LAYER) == GPTQFormat(4, 32, symmetric=True, less_one=True)


def test_a_tensor_of_groups_must_be_there_where_columns_are_ordered() -> None:
    for config, needed in [
        (changed("gptq"), False),
        (changed("gptq", desc_act=True), True),
        (changed("gptq", desc_act=True, group_size=-1), False),
    ]:
        format = scheme(config).format_of(LAYER)
        assert format is not None
        assert format.parts(LAYER, (32, 64))["g_idx"].optional is not needed


@pytest.mark.parametrize(
    ("config", "quantised", "plain"),
    [
        (changed("gptq"), [f"{LAYER}.mlp.up_proj"], ["lm_head"]),
        (changed("gptq", lm_head=True), [f"{LAYER}.mlp.up_proj", "lm_head"], []),
        (
            changed("gptq", modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]),
            [f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"],
            [f"{LAYER}.self_attn.k_proj", "lm_head"],
        ),
        (changed("awq"), [f"{LAYER}.mlp.up_proj"], ["lm_head"]),
        (
            changed("awq", modules_to_not_convert=["layers.1.self"]),
            [f"{LAYER}.mlp.up_proj", "model.layers.11.self_attn.q_proj"],
            [f"{LAYER}.self_attn.q_proj", "lm_head"],
        ),
        (changed("fp8-blocks"), [f"{LAYER}.mlp.up_proj"], ["lm_head"]),
        (
            changed("fp8-blocks", modules_to_not_convert=["model.layers.1", "o_proj"]),
            ["model.layers.11.mlp.up_proj", "lm_head"],
            [f"{LAYER}.mlp.up_proj", "model.layers.0.self_attn.o_proj"],
        ),
        (changed("w4", ignore=None), ["lm_head", f"{LAYER}.mlp.up_proj"], []),
        (
            changed("w4", ignore=["re:.*self_attn", f"{LAYER}.mlp.up_proj"]),
            ["lm_head", f"{LAYER}.mlp.up_proj_b", "model.layers.0.mlp.up_proj"],
            [f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"],
        ),
        (
            group(targets=["re:.*(q|k)_proj$", "model.layers.0.mlp.down_proj"]),
            [f"{LAYER}.self_attn.k_proj", "model.layers.0.mlp.down_proj"],
            [f"{LAYER}.self_attn.v_proj", f"{LAYER}.mlp.down_proj"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_lists_of_modules_are_honoured(
    config: dict[str, Any], quantised: list[str], plain: list[str]
) -> None:
    found = scheme(config)
    assert all(found.format_of(module) is not None for module in quantised)
    assert all(found.format_of(module) is None for module in plain)


def test_a_name_goes_before_an_expression_and_that_before_a_class() -> None:
    """As compressed-tensors orders the targets that a module matches."""
    groups = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 16, "strategy": "group"}},
        "some": {"targets": ["re:.*up_proj"], "weights": {"num_bits": 8, "group_size": 32, "strategy": "group"}},
        "one": {"targets": [f"{LAYER}.mlp.up_proj"], "weights": {"num_bits": 4, "group_size": 64, "strategy": "group"}},
    }  # fmt: skip
    found = scheme(changed("w4", config_groups=groups))
    modules = [f"{LAYER}.mlp.up_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]
    assert [str(found.format_of(module)) for module in modules] == [
        "4 bits in groups of 64", "8 bits in groups of 32", "8 bits in groups of 16",
    ]  # fmt: skip
    assert "8 bits in groups of 16 and" in found.described or "and 8 bits in groups of 16" in found.described
    twice = {name: {**settings, "targets": ["Linear"]} for name, settings in groups.items()}
    assert "another group has the target 'Linear'" in refusal(changed("w4", config_groups=twice))


def test_of_two_expressions_the_first_by_alphabet_decides() -> None:
    eight, four = ({"num_bits": bits, "group_size": 32} for bits in (8, 4))
    groups = {
        "b": {"targets": ["re:.*up_proj"], "weights": eight},
        "a": {"targets": ["re:.*mlp.*"], "weights": four},
    }
    assert str(scheme(changed("w4", config_groups=groups)).format_of(f"{LAYER}.mlp.up_proj")).startswith(
        "4 bits"
    )


def test_a_class_without_linear_layers_may_be_ignored() -> None:
    assert (
        scheme(changed("w4", ignore=["lm_head", "Embedding"])).format_of(f"{LAYER}.mlp.up_proj") is not None
    )


def test_groups_of_a_mixed_checkpoint_have_formats_of_their_own() -> None:
    groups = {
        "packed": {"targets": ["re:.*mlp"], "format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32}},
        "plain": {"targets": ["Linear"], "format": "naive-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    }  # fmt: skip
    found = scheme(changed("w4", format="mixed-precision", config_groups=groups))
    assert found.described == "compressed-tensors, 4 bits in groups of 32 and FP8 per channel"
    del groups["plain"]["format"]
    assert (
        "'plain': format is missing; it must be given where the format of all is mixed-precision"
        in refusal(changed("w4", format="mixed-precision", config_groups=groups))
    )


SCALARS = st.sampled_from(
    [None, True, False, "", "gptq", "x", -1, 0, 1, 4, 8, 128, 10**400, 0.5, "Linear", "re:(", "re:x"]
)
VALUES = (
    SCALARS
    | st.lists(SCALARS, max_size=2)
    | st.dictionaries(st.sampled_from(["weights", "targets", "a"]), SCALARS)
)
KEYS = sorted(
    {key for kind in KINDS.values() for key in kind.config} | {"sym", "modules_to_not_convert", "dynamic"}
)
INNER = ["targets", "weights", "input_activations", "format"]
OWN = ["num_bits", "type", "strategy", "group_size", "symmetric", "actorder", "dynamic"]


@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_value_is_accepted_or_refused_in_one_line(name: str, keys: dict[str, Any]) -> None:
    accepted_or_refused(changed(name, **keys))


@given(
    st.dictionaries(st.sampled_from(INNER), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(OWN), VALUES, max_size=3),
)
def test_any_group_is_accepted_or_refused_in_one_line(keys: dict[str, Any], own: dict[str, Any]) -> None:
    config = weights(**own)
    config["config_groups"]["group_0"].update(keys)
    accepted_or_refused(config)


def accepted_or_refused(config: Any) -> None:
    message = ""
    try:
        hash(read(config))
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
