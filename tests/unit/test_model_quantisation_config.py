"""`quantization_config` is read as strictly as every other key: what is not understood is refused by name."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CheckpointError
from foredraft.model.quantisation.gptq import AWQFormat, GPTQFormat
from foredraft.model.quantisation.scheme import Quantisation, WeightFormat
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


def accepted_or_refused(config: Any) -> str:
    """Return the one line that a config is refused with; it is empty for one that is accepted."""
    line = ""
    try:
        hash(read(config))
    except CheckpointError as error:
        line = str(error)
    assert "\n" not in line
    return line


def changed(name: str, **keys: Any) -> dict[str, Any]:
    return {**KINDS[name].config, **keys}


def group(**keys: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(dict(KINDS["w4"].config))
    config["config_groups"]["group_0"].update(keys)
    return config


def weights(name: str = "w4", **keys: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(dict(KINDS[name].config))
    config["config_groups"]["group_0"]["weights"].update(keys)
    return config


def test_a_spec_with_a_scheme_is_hashable_and_comparable() -> None:
    plain = ModelSpec.from_hf(CONFIG)
    one, two = (ModelSpec.from_hf({**CONFIG, "quantization_config": changed("gptq")}) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != plain
    assert plain.quantisation is None and read(None) is None


def test_the_old_key_of_compressed_tensors_is_read() -> None:
    old = {key: value for key, value in KINDS["w4"].config.items() if key != "quant_method"}
    assert read(old, "compression_config") == read(KINDS["w4"].config)
    both = {**CONFIG, "quantization_config": changed("w4"), "compression_config": changed("w4")}
    assert ModelSpec.from_hf(both).quantisation == read(changed("w4"))
    with pytest.raises(CheckpointError, match="compression_config is .*; quantization_config differs"):
        ModelSpec.from_hf({**both, "compression_config": changed("w4", ignore=[])})


NEIGHBOURS = "a token would depend on its neighbours"


def activations(type: str = "int", **keys: Any) -> dict[str, Any]:
    return group(input_activations={**by_token(type), **keys})


MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "group": group,
    "weights": weights,
    "weights in FP8": functools.partial(weights, "fp8-channel"),
    "activations": activations,
}
# kind of config -> the keys that decide what its tensors mean: no value is overlooked
DECIDING = {
    "gptq": "act_bits bits checkpoint_format data_type desc_act dynamic group_size is_marlin_format lm_head"
    " modules_in_block_to_quantize pack_dtype sym",
    "awq": "act_bits bits group_size lm_head modules_to_not_convert q_group_size sym to_quant_block_names version"
    " w_bit zero_point",
    "fp8-blocks": "activation_scheme fmt ignored_layers modules_to_convert modules_to_not_convert scale_fmt"
    " weight_block_size",
    "auto-round": "act_bits bits block_name_to_quantize data_type extra_config group_size packing_format rotation_config"
    " static_kv_dtype sym",
    "w4": "config_groups format ignore kv_cache_scheme quantization_status sparsity_config transform_config",
    "group": "extra format input_activations output_activations targets weights",
    "weights": "actorder block_structure dynamic extra group_size num_bits scale_dtype strategy symmetric type",
    "weights in FP8": "block_structure group_size num_bits strategy symmetric type",
    "activations": "dynamic extra group_size num_bits strategy symmetric type",
}
WRONG: list[Any] = ["other", -3, 3.5, [1], {"a": 1}]


def check_refused(config: Any, *named: str) -> None:
    line = accepted_or_refused(config)
    assert line.startswith("config.json") and ";" in line, f"{named}: {line}"
    assert any(each in line for each in named), f"{named}: {line}"


@pytest.mark.parametrize("kind", DECIDING)
def test_a_refused_value_is_named_with_its_key(kind: str) -> None:
    for key, value in itertools.product(DECIDING[kind].split(), WRONG):
        config = MAKERS[kind](**{key: value}) if kind in MAKERS else changed(kind, **{key: value})
        check_refused(config, key)


OF_ACTIVATIONS = "act_bits is 8; export models with quantised activations in the format llm_compressor"
SAID: list[tuple[Any, str]] = [
    # methods
    ("gptq", "config.json: quantization_config is 'gptq'; it must be a JSON object or null"),
    ({"bits": 4}, "quant_method is missing; supported are auto-round, awq, compressed-tensors"),
    ({"quant_method": "hqq"}, "quant_method is 'hqq'; supported are auto-round, awq"),
    ({"quant_method": ["gptq"]}, "quant_method is ['gptq']"),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        f"'bitsandbytes' with load_in_8bit picks outlier columns over all rows of a pass, so {NEIGHBOURS};"
        " give the 16-bit model that it was made from, with weights='int8'",
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "'bitsandbytes' with bnb_4bit_quant_type 'nf4' is not supported; give the 16-bit model that it was made from,"
        " with weights='int4'",
    ),
    *((changed(name, act_bits=8), OF_ACTIVATIONS) for name in ("gptq", "awq", "auto-round")),
    (changed("gptq", bits=3), "bits is 3; supported are 4, 8"),
    (changed("gptq", bits=4.0), "bits is 4.0"),
    (changed("gptq", bits=True), "bits is True"),
    (changed("gptq", group_size=0), "group_size is 0"),
    (changed("gptq", desc_act="yes"), "desc_act is 'yes'; it must be true or false"),
    (changed("gptq", checkpoint_format="marlin"), "is 'marlin'; supported are gptq, gptq_v2"),
    (changed("awq", backend="llm-awq"), "backend is 'llm-awq'"),
    (changed("awq", version="gemv"), "version is 'gemv'; only 'gemm' is supported"),
    (changed("awq", w_bit=8), "w_bit is 8; bits is another number"),
    (changed("awq", q_group_size=64), "q_group_size is 64; group_size is another number"),
    (changed("awq", sym=True), "sym is True; zero_point is True; they must differ"),
    (changed("fp8-blocks", activation_scheme="static"), "is 'static'; fixed scales of activations"),
    (
        changed("fp8-blocks", weight_block_size=None),
        f"weight_block_size is None; without blocks, activations have one scale in a pass, so {NEIGHBOURS}",
    ),
    (changed("fp8-blocks", weight_block_size=[64, 64]), "is [64, 64]; only [128, 128]"),
    (changed("fp8-blocks", modules_to_not_convert=[], ignored_layers=[]), "ignored_layers is []"),
    # AutoRound
    (changed("auto-round", packing_format="auto_round:auto_awq", bits=8), "bits is 8; supported are 4"),
    (changed("auto-round", static_kv_dtype="fp8"), "static_kv_dtype is 'fp8'; a quantised KV cache"),
    (changed("auto-round", block_name_to_quantize=[["model.layers.0", 1]]), "it must name model.layers"),
    (changed("auto-round", extra_config={"lm_head": 4}), "'lm_head' must be a JSON object"),
    (changed("auto-round", extra_config={"lm_head": {"bits": 3}}), "'lm_head': bits is 3; supported are 4"),
    (changed("auto-round", extra_config={"lm_head": {"act_bits": 8}}), "'lm_head': act_bits is 8"),
    (changed("auto-round", extra_config={"lm_head": {"new": 1}}), "'lm_head': new = 1 is not known"),
    (changed("auto-round", extra_config={".*(": {"bits": 8}}), "'.*(' is not a regular expression"),
    (changed("auto-round", extra_config={"(.+)+x": {"bits": 8}}), "'(.+)+x' may take for ever to match"),
    # compressed-tensors
    (changed("w4", kv_cache_scheme={"num_bits": 8}), "is {'num_bits': 8}; a quantised KV cache"),
    (changed("w4", config_groups={"W4A16": ["Linear"]}), "'W4A16' must be a JSON object"),
    (changed("w4", ignore=["re:("]), "'re:(' is not a regular expression"),
    (changed("w4", ignore=["re:(.+)+x"]), "'re:(.+)+x' may take for ever to match; repeat no groups"),
    (changed("w4", ignore=["re:" + ".*" * 9 + "x"]), "may take for ever to match"),
    (group(targets=["re:(q|k){9}x"]), "'re:(q|k){9}x' may take for ever to match"),
    (group(targets=["Embedding"]), "of the classes of modules only Linear and Conv1D are supported"),
    (group(targets=[]), "targets is []; it must name modules"),
    (activations(strategy="tensor"), NEIGHBOURS),
    (activations(strategy=None), NEIGHBOURS),
    (activations(dynamic=False), "fixed scales of activations are not supported"),
    (activations("float", strategy="group", group_size=64), "group_size is 64; supported are 128"),
    (activations("float", strategy="group"), "group_size is None; supported are 128"),
    (activations("float", group_size=128), "input_activations: group_size is 128; supported are null"),
    (weights(strategy="channel"), "group_size is 32; it does not fit the strategy 'channel'"),
    (weights(group_size=None), "group_size is None; it does not fit the strategy 'group'"),
    (weights("int8", num_bits=4), "num_bits is 4; supported are 8"),
    (weights("fp8-channel", strategy="block", block_structure=[64, 64]), "[64, 64]; supported are"),
    (weights("fp8-channel", strategy="block"), "block_structure is missing; supported are [128, 128]"),
    (weights("fp8-channel", strategy="group", group_size=32), "'group'; supported are channel, block"),
]


def test_a_refusal_says_what_to_do() -> None:
    for config, said in SAID:
        check_refused(config, said)


@pytest.mark.parametrize("name", KINDS)
def test_an_unknown_key_is_refused_in_every_method(name: str) -> None:
    assert "novelty = 3 is not known" in accepted_or_refused(changed(name, novelty=3))
    read(changed(name, novelty=None))


def test_harmless_keys_of_published_checkpoints_are_accepted() -> None:
    made = {
        "model_name_or_path": None, "model_file_base_name": "model", "static_groups": False, "is_marlin_format": False,
        "dataset": "c4", "dynamic": {}, "format": "gptq", "method": "gptq", "act_group_aware": True,
    }  # fmt: skip
    assert read(changed("gptq", **made)) == read(changed("gptq"))
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "do_fuse": False}
    assert read({**old, "backend": "autoawq", "modules_to_not_convert": None}) == read(changed("awq"))
    assert read(weights(observer="mse", observer_kwargs={}, zp_dtype="torch.int8")) == read(changed("w4"))
    assert read(weights(strategy=None, type="int")) == read(changed("w4"))


# all keys that published checkpoints of a method have
PUBLISHED: dict[str, dict[str, Any]] = {
    "gptq": {
        "act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True, "amp": True,
        "autoround_version": "0.5.1", "batch_size": 8, "bits": 4, "block_name_to_quantize": None,
        "cache_block_outputs": True, "checkpoint_format": "gptq", "damp_percent": 0.01, "data_type": "int",
        "dataset": None, "desc_act": False, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False,
        "enable_quanted_input": True, "exllama_config": {"version": 1}, "gradient_accumulate_steps": 1,
        "group_size": 128, "iters": 1000, "lm_head": False, "low_gpu_mem_usage": True, "lr": 0.001,
        "max_input_length": None, "meta": {"damp_percent": 0.01, "quantizer": ["gptqmodel:2.2.0"]}, "minmax_lr": 0.001,
        "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
        "nsamples": 512, "pack_dtype": "int32", "pad_token_id": None, "quant_method": "gptq",
        "scale_dtype": "torch.float16", "seqlen": 2048, "super_bits": None, "super_group_size": None, "sym": True,
        "to_quant_block_names": None, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False,
        "use_exllama": True,
    },
    "awq": {
        "autoround_version": "0.16.1", "backend": "autoawq", "bits": 4, "data_type": "int", "do_fuse": False,
        "enable_quanted_input": False, "exllama_config": None, "fuse_max_seq_len": None, "group_size": 128,
        "modules_to_fuse": None, "modules_to_not_convert": ["lm_head"], "provider": "auto-round", "quant_method": "awq",
        "sym": False, "to_quant_block_names": "model.layers", "version": "gemm", "zero_point": True,
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


LESS_ONE, WHOLE = (GPTQFormat(4, 32, symmetric=True, less_one=less) for less in (True, False))
LIKE_AWQ = AWQFormat(4, 32, symmetric=True)


@pytest.mark.parametrize(
    ("method", "key", "names", "format"),
    [
        ("gptq", "checkpoint_format", "gptq", LESS_ONE),
        ("gptq", "checkpoint_format", "gptq_v2", WHOLE),
        ("auto-round", "packing_format", "auto auto_round:auto_gptq auto_round:gptq auto_gptq", LESS_ONE),
        ("auto-round", "packing_format", "auto_round auto_round:gptqmodel", WHOLE),
        ("auto-round", "packing_format", "auto_round:auto_awq auto_round:awq auto_awq", LIKE_AWQ),
    ],
)
def test_a_weight_has_the_format_that_the_config_names(
    method: str, key: str, names: str, format: WeightFormat
) -> None:
    absent = {own: value for own, value in KINDS[method].config.items() if own != key}
    assert scheme(absent).format_of(UP) == LESS_ONE
    for name in names.split():
        assert scheme({**absent, key: name}).format_of(UP) == format, name


def test_a_tensor_of_groups_must_be_there_where_columns_are_ordered() -> None:
    ordered = {"desc_act": True}
    for keys, needed in (({}, False), (ordered, True), (ordered | {"group_size": -1}, False)):
        format = scheme(changed("gptq", **keys)).format_of(LAYER)
        assert format is not None and format.parts(LAYER, (32, 64))["g_idx"].optional is not needed, keys


UP, UP_0, UP_2, UP_11 = (f"model.layers.{layer}.mlp.up_proj" for layer in (1, 0, 2, 11))
Q, K, V = (f"{LAYER}.self_attn.{name}_proj" for name in "qkv")
DOWN, DOWN_0 = (f"model.layers.{layer}.mlp.down_proj" for layer in (1, 0))
BLOCKS: list[tuple[Any, str, str]] = [
    ("model.layers", UP_11, "lm_head"),
    ("model.layers.0, model.layers.2", UP_2, UP),
    (["model.layers"], UP, "lm_head"),
    ([["model.layers.0", "model.layers.1"]], UP, UP_2),
]
SOME = [["self_attn.q_proj"], ["mlp.up_proj"]]
MODULES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (changed("gptq"), [UP], ["lm_head"]),
    (changed("gptq", lm_head=True), [UP, "lm_head"], []),
    (changed("gptq", modules_in_block_to_quantize=SOME), [Q, UP], [K, "lm_head"]),
    (changed("awq"), [UP], ["lm_head"]),
    (changed("awq", modules_to_not_convert=["layers.1.self"]), [UP, UP_11], [Q, "lm_head"]),
    (changed("fp8-blocks"), [UP], ["lm_head"]),
    (changed("fp8-blocks", modules_to_not_convert=[LAYER, "up_proj"]), ["lm_head"], [Q, UP, UP_11]),
    (changed("fp8-blocks", modules_to_not_convert=[LAYER]), [UP_11, "lm_head"], [UP]),
    (changed("w4", ignore=None), ["lm_head", UP], []),
    (changed("w4", ignore=["lm_head", "Embedding"]), [UP], ["lm_head"]),
    (changed("w4", ignore=["re:.*self_attn", UP]), ["lm_head", f"{UP}_b", UP_0], [Q, UP]),
    (group(targets=["re:.*(q|k)_proj$", DOWN_0]), [K, DOWN_0], [V, DOWN]),
    (changed("auto-round", modules_to_not_convert=["mlp", r"0\.self_attn"]), [Q], [UP, Q.replace("1", "0")]),
    *(
        ({**changed("auto-round", block_name_to_quantize=None), key: blocks}, [quantised], [plain])
        for key in ("block_name_to_quantize", "to_quant_block_names", "quant_block_list")
        for blocks, quantised, plain in BLOCKS
    ),
]


@pytest.mark.parametrize(("config", "quantised", "plain"), MODULES, ids=str)
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
        "other": {"targets": ["re:model.*up_proj"], "weights": {"num_bits": 8, "group_size": 128, "strategy": "group"}},
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
    assert "another group has the target 'Linear'" in accepted_or_refused(changed("w4", config_groups=twice))


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
        in accepted_or_refused(changed("w4", format="mixed-precision", config_groups=groups))
    )


# --- AutoRound, as it reads its own configs ---------------------------------------------------------------


def test_single_modules_of_auto_round_have_settings_of_their_own() -> None:
    """Names go before expressions, of which the first decides; what is not given is that of all."""
    single = {
        ".*up_proj.*": {"bits": 8}, r".*layers\.1\.mlp.*": {"bits": 16, "data_type": "float"},
        f"{LAYER}.mlp.gate_proj": {"group_size": -1, "act_bits": 16}, "lm_head": {"bits": 8, "group_size": 64, "sym": False},
        ".*k_proj": {}, "v_proj": {"bits": 8, "group_size": 64},
    }  # fmt: skip
    found = scheme(changed("auto-round", extra_config=single))
    shown = {
        f"{LAYER}.mlp.up_proj": "8 bits in groups of 32", f"{LAYER}.mlp.gate_proj": "4 bits per channel",
        f"{LAYER}.mlp.down_proj": "None", "lm_head": "8 bits in groups of 64",
        "model.layers.0.mlp.down_proj": "4 bits in groups of 32", f"{LAYER}.self_attn.k_proj": "4 bits in groups of 32",
        f"{LAYER}.self_attn.v_proj": "8 bits in groups of 64",
    }  # fmt: skip
    assert {module: str(found.format_of(module)) for module in shown} == shown


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


@given(
    st.sampled_from(sorted(KINDS)),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(INNER), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(OWN), VALUES, max_size=3),
)
def test_any_value_is_accepted_or_refused_in_one_line(
    name: str, keys: dict[str, Any], inner: dict[str, Any], own: dict[str, Any]
) -> None:
    accepted_or_refused(changed(name, **keys))
    config = weights(**own)
    config["config_groups"]["group_0"].update(inner)
    accepted_or_refused(config)
