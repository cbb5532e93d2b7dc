"""`ModelSpec`: what it reads, and that whatever it cannot honour is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec, Rope
from tests.support.checkpoints import FAMILIES, FULL, GEMMA2, LLAMA, LLAMA3_ROPE, SLIDING

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


def test_llama_reads_every_size() -> None:
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "num_key_value_heads": 2, "attention_bias": True})
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.groups) == (3, 4, 2, 16, 2)
    assert spec.windows == (None, None, None)
    assert spec.attention_scale == 16**-0.5
    assert spec.qkv_bias
    assert spec.output_bias
    assert not spec.mlp_bias
    assert not spec.tied


def test_gemma2_reads_its_own_keys() -> None:
    spec = ModelSpec.from_hf(GEMMA2_CONFIG)
    assert spec.windows == (24, None, 24, None)
    assert (spec.attention_softcap, spec.logit_softcap) == (5.0, 8.0)
    assert spec.attention_scale == 24**-0.5
    assert spec.embedding_scale == 8.0
    assert spec.tied  # its default
    assert spec.norm_offset
    assert spec.post_norms


def test_gemma2_layer_types_are_honoured() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert ModelSpec.from_hf({**GEMMA2_CONFIG, "layer_types": kinds}).windows == (None, 24, 24, None)


def test_softcaps_may_be_null() -> None:
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = ModelSpec.from_hf({**GEMMA2_CONFIG, **nulls})
    assert spec.attention_softcap is None
    assert spec.logit_softcap is None


def test_softcaps_that_are_absent_are_not_null() -> None:
    """transformers writes null where a model has none; a config of before it did so means the defaults."""
    spec = ModelSpec.from_hf(without(GEMMA2_CONFIG, "attn_logit_softcapping", "final_logit_softcapping"))
    assert (spec.attention_softcap, spec.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize("size", [24, None])
def test_gemma2_may_spell_its_window_twice(size: int | None) -> None:
    """As google/gemma-2-9b does."""
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
def test_every_spelling_of_rope(keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).rope == Rope("llama3", 500.0, 8.0, 1.0, 4.0, 64)


def test_rope_defaults() -> None:
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
def test_both_spellings_of_dtype(keys: dict[str, Any], dtype: str) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).dtype == dtype


def test_end_tokens_are_those_of_both_files() -> None:
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": [2, 5]}, {"eos_token_id": [5, 9], "top_p": 0.9})
    assert spec.eos_token_ids == (2, 5, 9)
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": None}).eos_token_ids == ()
    assert spec.bos_token_id == 1


def test_ids_that_no_text_can_have() -> None:
    """-1 is how some files say none; what generation_config.json has beyond the vocabulary is never said."""
    none = {"eos_token_id": -1, "bos_token_id": -1}
    for generation in (None, {"eos_token_id": -1, "bos_token_id": -(2**70)}):
        spec = ModelSpec.from_hf({**LLAMA_CONFIG, **none}, generation)
        assert (spec.eos_token_ids, spec.bos_token_id) == ((), None)
    bare = without(LLAMA_CONFIG, "bos_token_id")
    spec = ModelSpec.from_hf(bare, {"eos_token_id": [5, 97, 10**400, -1], "bos_token_id": 97})
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2, 5), None)
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: eos_token_id is 'x'"):
        ModelSpec.from_hf(LLAMA_CONFIG, {"eos_token_id": "x"})


def test_model_type_stands_in_for_architectures() -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "architectures": None}).architecture == "LlamaForCausalLM"


def test_end_tokens_that_are_nowhere_are_the_familys() -> None:
    """As transformers has it: its config's default counts where no generation_config.json speaks."""
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
    {"attention_multiplier": 0.25},  # what it stands for: 1 / sqrt(head_dim)
    {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": None},
    {"auto_map": None, "quantization_config": None},
    {"num_key_value_heads": None, "head_dim": None},
]


@pytest.mark.parametrize("keys", NEUTRAL, ids=[", ".join(keys) for keys in NEUTRAL])
def test_neutral_values_are_let_through(keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}) == ModelSpec.from_hf(LLAMA_CONFIG)


def test_harmless_keys_are_let_through() -> None:
    extras = {
        "use_cache": False,
        "transformers_version": "4.1",
        "initializer_range": 9.0,
        "pretraining_tp": 2,  # transformers has no code for it any more
        "use_return_dict": True,
        "neftune_noise_alpha": 5,
        "model_max_length": 4096,
        "max_sequence_length": 10**6,  # without linear scaling
    }
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **extras}) == ModelSpec.from_hf(LLAMA_CONFIG)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_key_that_is_null_is_absent(family: str) -> None:
    """If nobody knows it, or nobody reads it; and some that are read."""
    nulls = dict.fromkeys(["num_experts", "compression_config", "is_decoder", "rope_interleaved"])
    read = {"attention_bias": None} | ({"mlp_bias": None} if family == "llama" else {})
    spec = ModelSpec.from_hf({**CONFIGS[family], **nulls, **read})
    assert spec == ModelSpec.from_hf(CONFIGS[family])
    rope = {**YARN, "alpha": None, "attn_factor": None}
    assert ModelSpec.from_hf({**CONFIGS[family], "rope_scaling": rope}) == ModelSpec.from_hf(
        {**CONFIGS[family], "rope_scaling": YARN}
    )


def test_the_remedy_for_attn_factor_is_what_it_means() -> None:
    """As deepseek-ai/DeepSeek-R1-0528-Qwen3-8B has it; in YaRN's own code it multiplies what yarn would do."""
    rope = {**YARN, "attn_factor": 0.8782488562869419}
    with pytest.raises(CheckpointError) as told:
        ModelSpec.from_hf({**CONFIGS["qwen3"], "rope_scaling": rope})
    assert str(told.value).endswith(
        "write attention_factor, which is 1 with it and 1.13863 without, and leave it out"
    )
    written = {**YARN, "attention_factor": 1}
    assert ModelSpec.from_hf({**CONFIGS["qwen3"], "rope_scaling": written}).rope.attention_factor == 1
    unsaid = ModelSpec.from_hf({**CONFIGS["qwen3"], "rope_scaling": YARN}).rope.attention_factor
    assert f"{unsaid:.6g}" == "1.13863"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (
        {"num_experts": 8},
        "num_experts = 8 is not known, and ignoring it could change the model's output; use",
    ),
    ({"logits_scaling": 8.0}, "is not supported, and ignoring it would change the model's output; use"),
    ({"rope_scaling": {**YARN, "attn_factor": 0.5}}, "attn_factor is 0.5; transformers does not read it"),
    ({"rope_scaling": {**YARN, "attn_factor": 1.0, "mscale": "1"}}, "mscale is '1'"),
    (
        {"rope_scaling": {**YARN, "attn_factor": 0.5, "attention_factor": 1.0}},
        "attn_factor = 0.5 is not known",
    ),
    ({"rope_scaling": {**YARN, "attention_factor": 0}}, "attention_factor is 0"),
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": "8192"},
        "max_sequence_length is '8192'",
    ),
    ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "'longrope' is not supported; supported are default, dynamic, linear, llama3, yarn",
    ),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor = 1.0"),
    ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor is '2'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha = 1000.0"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
    ({"rope_scaling": {**YARN, "factor": -1}}, "factor is -1"),
    ({"rope_scaling": {**YARN, "attention_factor": "1"}}, "attention_factor is '1'"),
    ({"rope_scaling": {**YARN, "mscale": [1]}}, "mscale is [1]"),
    ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_slow, 1.0, must be below beta_fast, 1.0"),
    ({"rope_scaling": {**YARN, "beta_slow": 64}}, "beta_slow is 64"),
    ({"rope_scaling": {**YARN, "truncate": None}}, "truncate is None"),
    ({"rope_scaling": {**YARN, "rope_theta": 1.0}}, "rope_theta is 1.0; yarn needs one above 1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim is 2"),
    ({"rope_parameters": {"full_attention": YARN}}, "full_attention"),
    ({"num_experts": 8}, "num_experts = 8"),
    ({"vision_config": {"hidden_size": 8}}, "vision_config"),
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
    ({"model_type": "mistral"}, "model_type is 'mistral'; architectures names LlamaForCausalLM"),
    ({"model_type": "gemma2"}, "model_type is 'gemma2'"),
    ({"attention_multiplier": 1.0}, "attention_multiplier is 1.0"),
    ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ({"hidden_size": float("inf")}, "hidden_size is inf"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "mscale": 2.0}}, "mscale"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"sliding_window": 64}, "sliding_window = 64"),
    ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer_types"),
    ({"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
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
    ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are Gemma2"),
    ({"architectures": ["LlamaForCausalLM", "X"]}, "is not supported"),
    ({"architectures": None, "model_type": "bert"}, "'bert' is not supported"),
    ({"architectures": None, "model_type": None}, "None is not supported"),
]


@pytest.mark.parametrize(("keys", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refusals_name_the_key(keys: dict[str, Any], named: str) -> None:
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
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_gemma2_refusals_name_the_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelSpec.from_hf({**GEMMA2_CONFIG, **keys})


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"sliding_window": "24"}, "sliding_window is '24'"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "it must name sliding_attention for each"),
    ("mistral", {"attention_bias": True}, "attention_bias = True"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts = 8"),
    ("mistral", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers is -1"),
    ("qwen2", {"max_window_layers": 1.5}, "max_window_layers is 1.5"),
    ("qwen2", {"max_window_layers": False}, "max_window_layers is False"),
    ("qwen2", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "it must name full_attention for each"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True"),
    ("qwen2", {"attention_bias": True}, "attention_bias = True"),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 1}}, "dual_chunk_attention_config"),
    ("qwen3", {"head_dim": None}, "head_dim is None"),
    ("qwen3", {"head_dim": 15}, "head_dim = 15"),
    ("qwen3", {"num_experts": 128}, "num_experts = 128"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("gemma3", {"sliding_window_pattern": None}, "sliding_window_pattern is None"),
    (
        "gemma3",
        {"sliding_window_pattern": 2, "layer_types": ["full_attention"] * 7},
        "layer_types says other",
    ),
    ("gemma3", {"_sliding_window_pattern": 2}, "_sliding_window_pattern is 2; give layer_types"),
    ("gemma3", {"sliding_window": None}, "sliding_window is None"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("gemma3", {"model_type": "gemma3"}, "model_type is 'gemma3'"),
    (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
        "it reads more than text, so give a checkpoint of its language model alone",
    ),
    ("gemma3", {"layer_types": ["sliding_attention"] * 6 + [["full_attention"]]}, "layer_types is"),
    *(
        (family, {"quantization_config": {"bits": 4}}, "quantization_config")
        for family in ("mistral", "qwen2", "qwen3", "gemma3")
    ),
]


@pytest.mark.parametrize(("family", "keys", "named"), OTHERS, ids=str)
def test_refusals_of_the_other_families(family: str, keys: dict[str, Any], named: str) -> None:
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
def test_what_published_checkpoints_spell_out_is_let_through(family: str, keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**CONFIGS[family], **keys}) == ModelSpec.from_hf(CONFIGS[family])


def test_what_the_families_differ_in() -> None:
    specs = {family: ModelSpec.from_hf(config) for family, config in CONFIGS.items()}
    assert {family for family, spec in specs.items() if spec.qkv_bias} == {"qwen2"}
    assert {family for family, spec in specs.items() if spec.head_norms} == {"qwen3", "gemma3"}
    assert {family for family, spec in specs.items() if spec.tied} == {"gemma2", "gemma3"}
    assert specs["mistral"].windows == (24, 24, 24)
    assert specs["gemma3"].windows == (*[24] * 5, None, 24)
    assert (specs["gemma3"].rope.theta, specs["gemma3"].rope_of(24).theta) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        ({}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),  # the key says the scaled length
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
def test_how_far_a_request_may_go(keys: dict[str, Any], positions: int) -> None:
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
def test_any_value_is_read_or_refused_in_one_line(config: dict[str, Any], keys: dict[str, Any]) -> None:
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


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        ModelSpec.from_folder(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        ModelSpec.from_folder(tmp_path / "nowhere")


def test_generation_config_is_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2, 7)
