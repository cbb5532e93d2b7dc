"""`ModelSpec` reads a config.json as transformers does: defaults, rotary parameters and windows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foredraft.errors import CheckpointError
from foredraft.model.rope import frequencies
from foredraft.model.spec import ModelSpec, Rope
from tests.support import variants_norms
from tests.support.checkpoints import (
    DEFAULTS,
    FAMILIES,
    FULL,
    GEMMA3,
    IN_ROPE,
    LLAMA,
    LLAMA3_ROPE,
    SCALED,
    SLIDING,
)

TOKENS = ["bos_token_id", "eos_token_id"]
CASES = [(family, key) for family, keys in DEFAULTS.items() for key in keys + TOKENS]
# head counts that the default number of key heads divides
HEADS: dict[str, dict[str, Any]] = {
    "exaone4": {"num_attention_heads": 32},
    "gemma": {"num_attention_heads": 16},
    "ministral": {"num_attention_heads": 8},
    "ministral3": {"num_attention_heads": 8},
    "phi3": {"vocab_size": 40_000},  # with the default ids of special tokens
    "seed-oss": {"num_attention_heads": 8},
    "smollm3": {"vocab_size": 130_000},
    "stablelm": {"num_attention_heads": 32, "hidden_size": 256},
    "mistral": {"num_attention_heads": 8},
    "qwen2": {"num_attention_heads": 32, "hidden_size": 128},
    "qwen3": {"num_attention_heads": 32},
}


@pytest.mark.parametrize(("family", "key"), CASES, ids="-".join)
def test_an_absent_key_has_the_default_of_transformers(family: str, key: str) -> None:
    config_class, model_class, base = FAMILIES[family]
    rest = {name: value for name, value in {**base, **HEADS.get(family, {})}.items() if name != key}
    defaults = config_class(**rest).to_dict()
    place = key if key in defaults else "per_layer_config"  # where it writes what it makes of a Gemma 4's
    written = {**rest, place: defaults[place]}
    names = {"architectures": [model_class.__name__]}
    assert ModelSpec.from_hf(names | rest) == ModelSpec.from_hf(names | written)


OLD = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
DEFAULT = {"rope_type": "default", "rope_theta": 500.0}


def config_of(keys: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **LLAMA, **copy.deepcopy(keys)}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 500.0},
        {"rope_scaling": None, "rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": {}, "rope_parameters": DEFAULT},
        {"rope_scaling": OLD},
        {"rope_scaling": OLD, "rope_theta": 500.0},
        {"rope_scaling": OLD, "rope_theta": 500.0, "rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": {"type": "llama3", **OLD}},
        {"rope_scaling": {k: v for k, v in OLD.items() if k != "original_max_position_embeddings"}},
    ],
    ids=str,
)
def test_rotary_parameters_equal_those_of_transformers(keys: dict[str, Any]) -> None:
    found = LlamaConfig(**config_of(keys)).rope_parameters
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaled = [found[name] for name in names] if found["rope_type"] == "llama3" else []
    assert ModelSpec.from_hf(config_of(keys)).rope == Rope(found["rope_type"], found["rope_theta"], *scaled)


KEEP_ONE = "keep the one that the model was trained with"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


# families whose rotary parameters have more keys, or whose base another key holds
OTHERS = {*IN_ROPE, *variants_norms.NESTED, "gpt_neox"}


@pytest.mark.parametrize("family", [family for family in SCALED if family not in OTHERS])
@pytest.mark.parametrize(
    "rope",
    [
        LINEAR,
        OLD,
        {"rope_type": "dynamic", "factor": 4.0},
        YARN,
        {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
        {**YARN, "attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 2.0},
        {**YARN, "attention_factor": None, "mscale": None, "beta_fast": None, "beta_slow": None},
        {**YARN, "beta_fast": 8, "beta_slow": 0.5},
        {**YARN, "mscale": 0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 0.0, "mscale_all_dim": 0, "beta_fast": 0, "beta_slow": 0},
        {**YARN, "finetuned": True, "attn_factor": None},
        {**LINEAR, "original_max_position_embeddings": 64, "finetuned": True},
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
        {**YARN, "factor": None},
        {**YARN, "factor": 0.5},
    ],
    ids=str,
)
def test_scaled_frequencies_equal_those_of_transformers(family: str, rope: dict[str, Any]) -> None:
    config_class, model_class, base = FAMILIES[family]
    config = config_class(**base, rope_scaling=copy.deepcopy(rope), rope_theta=700.0)
    by_layer = {"layer_type": "full_attention"} if family == "gemma3" else {}
    expected, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **by_layer)
    written = {"rope_scaling": rope, "rope_theta": 700.0, "architectures": [model_class.__name__]}
    spec = ModelSpec.from_hf({**base, **written})
    torch.testing.assert_close(frequencies(spec.rope, spec.head_dim), expected, rtol=1e-6, atol=0)
    assert spec.rope.attention_factor == attention


def gemma3(keys: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Gemma3ForCausalLM"], **GEMMA3, **copy.deepcopy(keys)}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        {"rope_scaling": LINEAR},
        {"rope_scaling": {**LINEAR, "type": "linear"}, "rope_theta": 500.0},
        {"rope_parameters": {"full_attention": {"type": "linear", "factor": 4.0}}},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT}},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 500.0}}, "rope_scaling": None},
        {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 50.0}}},
        {"rope_parameters": {"full_attention": LINEAR}, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": DEFAULT}, "rope_theta": 500.0},
        {"rope_parameters": None, "rope_theta": 500},
    ],
    ids=str,
)
def test_rotary_parameters_by_layer_equal_those_of_transformers(keys: dict[str, Any]) -> None:
    found = Gemma3TextConfig(**gemma3(keys)).rope_parameters
    spec = ModelSpec.from_hf(gemma3(keys))
    for rope, kind in ((spec.rope, "full_attention"), (spec.window_rope, "sliding_attention")):
        expected = found[kind]
        assert rope == Rope(expected["rope_type"], expected["rope_theta"], expected.get("factor", 1.0))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope_parameters": {"full_attention": LINEAR}, "rope_scaling": DEFAULT}, "differ; keep the one"),
        ({"rope_parameters": {"full_attention": DEFAULT}, "rope_theta": 1e6}, "rope_theta is 1000000.0"),
        (
            {"rope_parameters": {"sliding_attention": DEFAULT}, "rope_local_base_freq": 1e4},
            "rope_local_base_freq is 10000.0",
        ),
        ({"rope_parameters": DEFAULT}, "rope_parameters: rope_type = 'default' is not supported"),
        ({"rope_parameters": {"full_attention": "default"}}, "full_attention is 'default'"),
        ({"rope_parameters": {"truncate": None}}, "rope_parameters: truncate is None"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_scaling: type is 'linear'; spell it rope_type",
        ),
        ({"rope_local_base_freq": "1"}, "rope_local_base_freq is '1'"),
        # of a Llama: transformers prefers rope_scaling to rope_parameters, and the inner rope_theta to the outer one
        (config_of({"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3_ROPE}), KEEP_ONE),
        (
            config_of({"rope_scaling": OLD, "rope_parameters": LLAMA3_ROPE}),
            KEEP_ONE,
        ),  # with the default theta
        (config_of({"rope_theta": 1e6, "rope_parameters": LLAMA3_ROPE}), KEEP_ONE),
    ],
)
def test_wrong_rotary_parameters_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_hf(keys if "architectures" in keys else gemma3(keys))
    assert named in str(caught.value)


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"use_sliding_window": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]}),
    ("qwen3", {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1}),
    ("gemma3", {"sliding_window_pattern": 3}),
    ("gemma3", {"sliding_window_pattern": 1, "_sliding_window_pattern": 1}),
    ("gemma3", {"layer_types": [FULL, *[SLIDING] * 6], "_sliding_window_pattern": 6}),
    ("gemma3", {"layer_types": None, "sliding_window": 7}),
]


@pytest.mark.parametrize(("family", "keys"), WINDOWS, ids=str)
def test_windows_equal_those_of_transformers(family: str, keys: dict[str, Any]) -> None:
    config_class, model_class, base = FAMILIES[family]
    config = config_class(**{**base, **keys})
    kinds = (
        getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    )  # Mistral has no layer_types
    spec = ModelSpec.from_hf({"architectures": [model_class.__name__], **base, **keys})
    assert spec.windows == tuple(config.sliding_window if kind == SLIDING else None for kind in kinds)
