"""`ModelSpec`: what it reads, and that whatever it cannot honour is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import GEMMA2, LLAMA, LLAMA3_ROPE
from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec, Rope

LLAMA_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA}
GEMMA2_CONFIG: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **GEMMA2}


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


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "llama3"}
            | {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_theta", "rope_type")},
        },
    ],
    ids=["new", "old", "oldest"],
)
def test_both_spellings_of_rope(keys: dict[str, Any]) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **keys}).rope == Rope("llama3", 500.0, 8.0, 1.0, 4.0, 64)


def test_rope_defaults() -> None:
    assert ModelSpec.from_hf(LLAMA_CONFIG).rope == Rope("default", 10000.0)
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "rope_scaling": None, "rope_theta": 5e5}).rope.theta == 5e5


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(key: str) -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, key: "bfloat16"}).dtype == "bfloat16"


def test_end_tokens_are_those_of_both_files() -> None:
    spec = ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": [2, 5]}, {"eos_token_id": [5, 9], "top_p": 0.9})
    assert spec.eos_token_ids == (2, 5, 9)
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "eos_token_id": None}).eos_token_ids == ()
    assert spec.bos_token_id == 1


def test_model_type_stands_in_for_architectures() -> None:
    assert ModelSpec.from_hf({**LLAMA_CONFIG, "architectures": None}).architecture == "LlamaForCausalLM"


def test_harmless_keys_are_let_through() -> None:
    extras = {
        "use_cache": False,
        "transformers_version": "4.1",
        "initializer_range": 9.0,
        "pretraining_tp": 1,
    }
    assert ModelSpec.from_hf({**LLAMA_CONFIG, **extras}) == ModelSpec.from_hf(LLAMA_CONFIG)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"pretraining_tp": 2}, "pretraining_tp"),
    ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "high_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "mscale": 2.0}}, "mscale"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"sliding_window": 64}, "sliding_window = 64"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ({"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ({"head_dim": 15}, "head_dim = 15"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"hidden_size": 64.5}, "hidden_size is 64.5"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
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
