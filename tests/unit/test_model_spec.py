"""`ModelSpec` reads every supported config key, and refuses every other key or value by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import foredraft
from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader
from foredraft.model.spec import ModelSpec, Rope
from tests.support import variants_gemma4
from tests.support.checkpoints import (
    FAMILIES,
    FULL,
    GEMMA2,
    IN_ROPE,
    LLAMA,
    LLAMA3_ROPE,
    SCALED,
    SLIDING,
    save_checkpoint,
)

LLAMA_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
GEMMA2_CONFIG: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **GEMMA2}
CONFIGS: dict[str, dict[str, Any]] = {
    family: {"architectures": [model_class.__name__], "model_type": config_class.model_type, **base}
    for family, (config_class, model_class, base) in FAMILIES.items()
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLD_ROPE = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_config_is_read() -> None:
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "num_key_value_heads": 2, "attention_bias": True})
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.groups) == (3, 4, 2, 16, 2)
    assert spec.windows == (None, None, None)
    assert spec.attention_scale == 16**-0.5
    assert spec.qkv_bias
    assert spec.output_bias
    assert not spec.mlp_bias
    assert not spec.tied


def test_gemma2_config_is_read() -> None:
    spec = ModelSpec.from_hf(GEMMA2_CONFIG)
    assert spec.windows == (24, None, 24, None)
    assert (spec.attention_softcap, spec.logit_softcap) == (5.0, 8.0)
    assert spec.attention_scale == 24**-0.5
    assert spec.embedding_scale == 8.0
    assert spec.tied  # its default
    assert spec.norm_offset
    assert spec.post_norms


def test_gemma2_windows_follow_layer_types() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert ModelSpec.from_hf({**GEMMA2_CONFIG, "layer_types": kinds}).windows == (None, 24, 24, None)


def test_null_softcaps_switch_them_off() -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = ModelSpec.from_hf({**GEMMA2_CONFIG, **nulls})
    assert spec.attention_softcap is None
    assert spec.logit_softcap is None


def test_absent_softcaps_have_their_defaults() -> None:
    """transformers writes null for a model without soft-caps; older configs rely on the defaults."""
    spec = ModelSpec.from_hf(without(GEMMA2_CONFIG, "attn_logit_softcapping", "final_logit_softcapping"))
    assert (spec.attention_softcap, spec.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize("size", [24, None])
def test_gemma2_may_have_both_window_keys(size: int | None) -> None:
    """google/gemma-2-9b does."""
    assert ModelSpec.from_hf({**GEMMA2_CONFIG, "sliding_window_size": size}) == ModelSpec.from_hf(
        GEMMA2_CONFIG
    )
    lone = {**without(GEMMA2_CONFIG, "sliding_window"), "sliding_window_size": 4096}
    assert ModelSpec.from_hf(lone).windows[0] == 4096


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 500.0, "rope_scaling": OLD_ROPE},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3"} | without(OLD_ROPE, "rope_type")},
        {"rope_theta": 500, "rope_scaling": OLD_ROPE, "rope_parameters": LLAMA3_ROPE},
        {"rope_theta": None, "rope_scaling": {}, "rope_parameters": {**LLAMA3_ROPE, "type": "llama3"}},
    ],
    ids=["new", "old", "oldest", "both", "emptied"],
)
def test_every_spelling_of_rotary_parameters_is_read(keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).rope == Rope("llama3", 500.0, 8.0, 1.0, 4.0, 64)


def test_rotary_parameters_have_defaults() -> None:
    assert ModelSpec.from_hf(LLAMA_CONFIG).rope == Rope("default", 10000.0)
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "rope_scaling": None, "rope_theta": 5e5}).rope.theta == 5e5


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_both_spellings_of_dtype_are_read(keys: dict[str, Any], dtype: str) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).dtype == dtype


def test_eos_ids_come_from_both_files() -> None:
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": [2, 5]}, {"eos_token_id": [5, 9], "top_p": 0.9})
    assert spec.eos_token_ids == (2, 5, 9)
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": None}).eos_token_ids == ()
    assert spec.bos_token_id == 1


def test_negative_ids_and_ids_beyond_the_vocabulary_are_left_out() -> None:
    """Some files write -1 for no id; generation_config.json may come from a larger vocabulary."""
    none = {"eos_token_id": -1, "bos_token_id": -1}
    for generation in (None, {"eos_token_id": -1, "bos_token_id": -(2**70)}):
        spec = ModelSpec.from_hf({**LLAMA_CONFIG, **none}, generation)
        assert (spec.eos_token_ids, spec.bos_token_id) == ((), None)
    bare = without(LLAMA_CONFIG, "bos_token_id")
    spec = ModelSpec.from_hf(bare, {"eos_token_id": [5, 97, 10**400, -1], "bos_token_id": 97})
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2, 5), None)
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id is 'x'"):
        ModelSpec.from_hf(LLAMA_CONFIG, {"eos_token_id": "x"})


def test_model_type_decides_the_architecture() -> None:
    for names in (None, ["LLaMAForCausalLM"], ["MistralForCausalLM"], ["LlamaForCausalLM", "X"]):
        spec = ModelSpec.from_hf({**LLAMA_CONFIG, "architectures": names})
        assert spec.architecture == "LlamaForCausalLM"
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "model_type": None, "architectures": ["MistralForCausalLM"]})
    assert spec.architecture == "MistralForCausalLM"


def test_absent_eos_and_bos_ids_have_the_defaults_of_the_family() -> None:
    """transformers applies its config defaults only where there is no generation_config.json."""
    bare = without(GEMMA2_CONFIG, "eos_token_id", "bos_token_id")
    spec = ModelSpec.from_hf(bare)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((1,), 2)
    spec = ModelSpec.from_hf(bare, {"bos_token_id": 5})
    assert (spec.eos_token_ids, spec.bos_token_id) == ((), 5)


NEUTRAL: list[dict[str, Any]] = [
    {"sliding_window": None},
    {"sliding_window": None, "use_sliding_window": False, "layer_types": None},
    {"layer_types": ["full_attention"] * 3},
    {"residual_multiplier": 1.0, "embedding_multiplier": 1, "logits_scaling": 1.0},
    {"residual_multiplier": None, "attention_multiplier": None},
    {"attention_multiplier": 0.25},  # the default scale, 1 / sqrt(head_dim)
    {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None},
    {"auto_map": None, "quantization_config": None},
    {"num_key_value_heads": None, "head_dim": None},
]


@pytest.mark.parametrize("keys", NEUTRAL, ids=[", ".join(keys) for keys in NEUTRAL])
def test_neutral_values_are_accepted(keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}) == ModelSpec.from_hf(LLAMA_CONFIG)


def test_harmless_keys_are_accepted() -> None:
    extras = {
        "use_cache": False,
        "transformers_version": "4.1",
        "initializer_range": 9.0,
        "pretraining_tp": 2,  # transformers dropped its code
        "use_return_dict": True,
        "neftune_noise_alpha": 5,
        "model_max_length": 4096,
        "max_sequence_length": 10**6,  # without linear scaling
    }
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **extras}) == ModelSpec.from_hf(LLAMA_CONFIG)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_null_key_counts_as_absent(family: str) -> None:
    """Unknown keys, keys that are not read, and some keys that are."""
    nulls = dict.fromkeys(["num_experts", "compression_config", "is_decoder", "rope_interleaved"])
    # there null is false
    read = {} if family in ("glm4", "gpt_neox", "seed-oss") else {"attention_bias": None}
    read |= {"mlp_bias": None} if family == "llama" else {}
    spec = ModelSpec.from_hf({**CONFIGS[family], **nulls, **read})
    assert spec == ModelSpec.from_hf(CONFIGS[family])
    if family not in SCALED:
        return
    config = {key: value for key, value in CONFIGS[family].items() if key != "rope_parameters"}
    scaled = {**YARN, **IN_ROPE.get(family, {})}
    rope = {**scaled, "alpha": None, "attn_factor": None}
    assert ModelSpec.from_hf({**config, "rope_scaling": rope}) == ModelSpec.from_hf(
        {**config, "rope_scaling": scaled}
    )


# keys with a meaning elsewhere, and keys that transformers reads and this project does not understand
FOREIGN: dict[str, Any] = {
    "auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
    "quantization": {"group_size": 64, "bits": 4},
    "dual_chunk_attention_config": {"chunk_size": 1},
    "logit_scale": 0.5,
    "scale_emb": 12,
    "rope_traditional": True,
    "is_causal": False,
    "is_encoder_decoder": True,
    "attention_chunk_size": 64,
    "per_layer_config": {"1": {"rms_norm_eps": 1.0}},
    "transformers_weights": "other.safetensors",
    "configuration_files": ["config.5.0.0.json"],
}


@pytest.mark.parametrize("key", FOREIGN)
def test_a_key_that_could_change_the_output_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} = .* is not supported: "):
        ModelSpec.from_hf({**LLAMA_CONFIG, key: FOREIGN[key]})


def test_the_ignored_keys_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """In one line of level INFO for each model that is loaded."""
    rope = {"rope_parameters": {**YARN, "attn_factor": 0.5}}
    save_checkpoint(tmp_path, unk_token_id=0, use_cache=False, **rope)
    with caplog.at_level("INFO", "foredraft"):
        foredraft.load(tmp_path, device="cpu")
    lines = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert lines == [
        f"{tmp_path / 'config.json'}: ignored, because transformers does not read it:"
        " unk_token_id = 0, rope_parameters.attn_factor = 0.5"
    ]


def test_a_section_of_another_file_is_as_strict_as_ever() -> None:
    """`quantization_config`, and the metadata of a GGUF file, are not read by the rule of config.json."""
    reader = ConfigReader({"known": 1, "other": 2})
    assert reader.take("known") == 1
    with pytest.raises(CheckpointError, match="other = 2 is not known"):
        reader.reject_unknown_keys()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0"),
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": "8192"},
        "max_sequence_length is '8192'",
    ),
    ({"hidden_act": "relu6"}, "hidden_act = 'relu6'"),
    (
        {"rope_scaling": {"rope_type": "su", "factor": 2.0}},
        "'su' is not supported; supported are default, dynamic, linear, llama3, longrope, yarn",
    ),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor is '2'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha = 1000.0"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {**YARN, "factor": -1}}, "factor is -1"),
    ({"rope_scaling": {**YARN, "attention_factor": "1"}}, "attention_factor is '1'"),
    ({"rope_scaling": {**YARN, "mscale": [1]}}, "mscale is [1]"),
    ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_slow, 1.0, must be less than beta_fast, 1.0"),
    ({"rope_scaling": {**YARN, "beta_slow": 64}}, "beta_slow is 64"),
    ({"rope_scaling": {**YARN, "truncate": None}}, "truncate is None"),
    ({"rope_scaling": {**YARN, "rope_theta": 1.0}}, "rope_theta is 1.0; yarn needs a base above 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim is 2"),
    ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
    ({"rope_scaling": without(OLD_ROPE, "high_freq_factor")}, "rope_scaling: high_freq_factor is missing"),
    ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be a JSON object"),
    ({"rope_parameters": [1]}, "rope_parameters is [1]"),
    ({"rope_scaling": {**OLD_ROPE, "factor": "8"}}, "factor is '8'"),
    ({"rope_scaling": {**OLD_ROPE, "factor": True}}, "factor is True"),
    ({"rope_scaling": {**OLD_ROPE, "factor": float("inf")}}, "factor is inf"),
    ({"rope_scaling": {**OLD_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
    ({"rope_scaling": {**OLD_ROPE, "low_freq_factor": -1.0}}, "low_freq_factor is -1.0"),
    ({"rope_scaling": {**OLD_ROPE, "high_freq_factor": 0.5}}, "high_freq_factor, 0.5"),
    (
        {"rope_scaling": {**OLD_ROPE, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0",
    ),
    ({"rope_scaling": {**OLD_ROPE, "type": "yarn"}}, "type is 'yarn'; rope_type is 'llama3'"),
    ({"rope_theta": -1}, "rope_theta is -1"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_theta": None}, "rope_theta is None"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_parameters: rope_theta is 0"),
    ({"rope_parameters": LLAMA3_ROPE, "rope_theta": 1e4}, "rope_theta is 10000.0"),
    ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": {"rope_type": "default"}}, "differ; keep the one"),
    ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": OLD_ROPE}, "differ; keep the one"),  # another theta
    ({"auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}}, "auto_map = "),
    ({"attention_multiplier": 1.0}, "attention_multiplier is 1.0"),
    ({"logits_scaling": 8.0}, "logits_scaling = 8.0 is not supported: exllamav2 divides logits; use"),
    ({"model_type": "gemma2", "hidden_activation": "relu6"}, "hidden_activation = 'relu6'"),
    ({"original_max_position_embeddings": "64"}, "original_max_position_embeddings is '64'"),
    (
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        "original_max_position_embeddings is 32; config.json, rope_scaling has 64; keep the one",
    ),
    ({"rope_scaling": {**YARN, "extrapolation_factor": 0.5}}, "extrapolation_factor = 0.5"),
    ({"sliding_window": 0}, "sliding_window is 0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ({"hidden_size": float("inf")}, "hidden_size is inf"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
    ({"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"dtype": "float16", "torch_dtype": "bfloat16"}, "torch_dtype is 'bfloat16'; dtype is 'float16'"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ({"head_dim": 15}, "head_dim = 15"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"hidden_size": 64.5}, "hidden_size is 64.5"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
    ({"eos_token_id": "</s>"}, "config.json: eos_token_id is '</s>'"),
    ({"eos_token_id": 97}, "config.json: eos_token_id is 97, but vocab_size is 97; give an id below it"),
    ({"eos_token_id": [2, 2**63]}, "eos_token_id is [2, 9223372036854775808], but vocab_size is 97"),
    ({"bos_token_id": 10**400}, "bos_token_id is 1000"),
    ({"bos_token_id": [1]}, "bos_token_id is"),
    (
        {"architectures": ["MambaForCausalLM"], "model_type": None},
        "architecture 'MambaForCausalLM' is not supported; supported are cohere2, exaone4",
    ),
    ({"architectures": ["LlamaForCausalLM", "X"], "model_type": None}, "is not supported"),
    ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
    ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ({"architectures": None, "model_type": None}, "None is not supported"),
]


@pytest.mark.parametrize(("keys", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_a_refusal_names_the_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf({**LLAMA_CONFIG, **keys})
    message = str(caught.value)
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"sliding_window_size": 4096}, "sliding_window_size is 4096; it must equal sliding_window, 24"),
        ({"head_dim": None}, "head_dim is None"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ({"attention_multiplier": 0.25}, "attention_multiplier is 0.25"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"hidden_activation": "silly"}, "hidden_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_a_gemma2_refusal_names_the_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelSpec.from_hf({**GEMMA2_CONFIG, **keys})


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"sliding_window": "24"}, "sliding_window is '24'"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1"),
    ("qwen2", {"max_window_layers": 1.5}, "max_window_layers is 1.5"),
    ("qwen2", {"max_window_layers": False}, "max_window_layers is False"),
    ("qwen2", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "it must name full_attention for each"),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
    ("qwen3", {"head_dim": None}, "head_dim is None"),
    ("qwen3", {"head_dim": 15}, "head_dim = 15"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("gemma3", {"sliding_window_pattern": None}, "sliding_window_pattern is None"),
    (
        "gemma3",
        {"sliding_window_pattern": 2, "layer_types": ["full_attention"] * 7},
        "layer_types differs",
    ),
    ("gemma3", {"sliding_window": None}, "sliding_window is None"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma3", {"model_type": "gemma3"}, "text_config is missing"),
    (
        "gemma3",
        {"model_type": "llava", "text_config": {}},
        "is not supported: it is a model of images, with or without text; give a dense model",
    ),
    ("gemma3", {"layer_types": ["sliding_attention"] * 6 + [["full_attention"]]}, "layer_types is"),
    *(
        (family, {"quantization_config": {"bits": 4}}, "quantization_config")
        for family in ("mistral", "qwen2", "qwen3", "gemma3")
    ),
]


@pytest.mark.parametrize(("family", "keys", "named"), OTHERS, ids=str)
def test_a_refusal_of_another_family_names_the_key(family: str, keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf({**CONFIGS[family], **keys})
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("mistral", {"attention_bias": False, "use_sliding_window": False, "layer_types": None}),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}),
        (
            "qwen2",
            {"use_mrope": False, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": 9},
        ),
        ("qwen2", {"layer_types": ["full_attention"] * 3, "head_dim": 16, "rope_scaling": None}),
        ("qwen3", {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}),
        ("gemma3", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_scaling": None}),
        ("gemma3", {"sliding_window_pattern": 6, "_sliding_window_pattern": 6}),
        ("gemma3", {"use_bidirectional_attention": False, "cache_implementation": "hybrid"}),
    ],
    ids=str,
)
def test_redundant_keys_of_published_checkpoints_are_accepted(family: str, keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**CONFIGS[family], **keys}) == ModelSpec.from_hf(CONFIGS[family])


def test_families_differ_in_biases_norms_and_windows() -> None:
    specs = {family: ModelSpec.from_hf(config) for family, config in CONFIGS.items()}
    gemma4 = {*variants_gemma4.FAMILIES}
    biased = {family for family, spec in specs.items() if spec.qkv_bias}
    assert biased == {"qwen2", "seed-oss", "glm4", "gpt2", "gpt_neox", "opt", "phi", "starcoder2"}
    normed = {family for family, spec in specs.items() if spec.head_norms}
    assert normed == {"qwen3", "gemma3", "exaone4"} | gemma4
    assert {family for family, spec in specs.items() if spec.value_norms} == gemma4
    tied = {family for family, spec in specs.items() if spec.tied}
    assert tied == {"gemma", "gemma2", "gemma3", "smollm3", "cohere2", "gpt2", "opt", "starcoder2"} | gemma4
    assert {family for family, spec in specs.items() if not spec.pre_norms} == {"exaone4", "olmo2", "olmo3"}
    parallel = {family for family, spec in specs.items() if spec.parallel_residual}
    assert parallel == {"cohere2", "gpt_neox", "phi"}
    ungated = {family for family, spec in specs.items() if not spec.gated}
    assert ungated == {"gpt2", "gpt_neox", "opt", "phi", "starcoder2"}
    assert specs["mistral"].windows == (24, 24, 24)
    assert specs["gemma3"].windows == (*[24] * 5, None, 24)
    assert (specs["gemma3"].rope.theta, specs["gemma3"].rope_of(24).theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        ({}, 2048),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            2048,
        ),  # max_position_embeddings is the scaled length
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 8192}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": None}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 64}, 2048),
        ({"rope_scaling": YARN, "max_sequence_length": 8192}, 2048),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 5120),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, 2048),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, 2**31 - 1),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": YARN}, 2048),  # 4 times 64 would be less
        ({"rope_scaling": OLD_ROPE}, 2048),
    ],
)
def test_max_positions_follow_the_rope_scaling(keys: dict[str, Any], positions: int) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).max_positions == positions


SCALARS = (
    st.sampled_from(
        [None, True, False, "llama3", "yarn", "dynamic", "", -1, 0, 1, 3, 2**40, 10**400, 0.5, 1e300, -0.0]
    )
    | st.floats()
)
ROPE_KEYS = [
    *LLAMA3_ROPE,
    *YARN,
    "type",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "truncate",
]
NESTED = st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS)


KEYS = """rope_theta rope_scaling rope_parameters dtype hidden_act layer_types hidden_activation rms_norm_eps
attention_bias sliding_window_size attention_multiplier use_sliding_window max_window_layers sliding_window_pattern
_sliding_window_pattern rope_local_base_freq""".split()


@given(
    st.sampled_from([*CONFIGS.values()]),
    st.dictionaries(
        st.sampled_from([*GEMMA2_CONFIG, *KEYS]),
        SCALARS
        | NESTED
        | st.lists(NESTED, max_size=2)
        | st.dictionaries(st.sampled_from([FULL, SLIDING]), NESTED),
        min_size=1,
        max_size=3,
    ),
)
def test_any_value_is_accepted_or_refused_in_one_line(config: dict[str, Any], keys: dict[str, Any]) -> None:
    message = ""
    try:
        ModelSpec.from_hf({**config, **keys})
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.parametrize("content", ["{", "[]", b"\xff\xfe\xff"])
def test_a_broken_config_file_is_named(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        ModelSpec.from_folder(tmp_path / "nowhere")


def test_generation_config_is_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2, 7)


def test_layouts_of_several_depths_are_several() -> None:
    """The last norm of an OPT with norms of sums is named by its layer; a cache of layouts must tell them apart."""
    _, _, base = FAMILIES["opt"]
    norms = {
        layers: ModelSpec.from_hf(
            {
                **base,
                "model_type": "opt",
                "num_hidden_layers": layers,
                "do_layer_norm_before": False,
                "word_embed_proj_dim": 24,
            }
        ).naming.stored_name("model.norm.weight")
        for layers in (2, 3)
    }
    assert norms == {layers: f"model.decoder.layers.{layers - 1}.final_layer_norm.weight" for layers in norms}
