"""A config.json as transformers reads it: what is absent, and where the rotary parameters come from.

Seen to fail on: soft-caps off where absent, key heads of a Gemma 2 defaulting to its heads, Llama tied by
default, the refusal of contradicting rotary parameters left out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig

from checkpoints import DEFAULTS, FAMILIES, LLAMA, LLAMA3_ROPE
from foredraft.errors import CheckpointError
from foredraft.model.spec import ModelSpec, Rope

TOKENS = ["bos_token_id", "eos_token_id"]
CASES = [(family, key) for family, keys in DEFAULTS.items() for key in keys + TOKENS]
# transformers' number of key heads must divide the heads
HEADS: dict[str, dict[str, Any]] = {
    "mistral": {"num_attention_heads": 8},
    "qwen2": {"num_attention_heads": 32, "hidden_size": 128},
    "qwen3": {"num_attention_heads": 32},
}


@pytest.mark.parametrize(("family", "key"), CASES, ids="-".join)
def test_an_absent_key_has_the_default_of_transformers(family: str, key: str) -> None:
    config_class, model_class, base = FAMILIES[family]
    rest = {name: value for name, value in {**base, **HEADS.get(family, {})}.items() if name != key}
    spelled = {**rest, key: config_class(**rest).to_dict()[key]}
    names = {"architectures": [model_class.__name__]}
    assert ModelSpec.from_hf(names | rest) == ModelSpec.from_hf(names | spelled)


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
def test_rope_is_read_alike(keys: dict[str, Any]) -> None:
    found = LlamaConfig(**config_of(keys)).rope_parameters
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaled = [found[name] for name in names] if found["rope_type"] == "llama3" else []
    assert ModelSpec.from_hf(config_of(keys)).rope == Rope(found["rope_type"], found["rope_theta"], *scaled)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": OLD, "rope_parameters": LLAMA3_ROPE},  # its rope_theta would be the default
        {"rope_theta": 1e6, "rope_parameters": LLAMA3_ROPE},
    ],
    ids=str,
)
def test_rope_that_contradicts_itself_is_refused(keys: dict[str, Any]) -> None:
    """transformers takes rope_scaling before rope_parameters, and the theta inside before the one outside."""
    with pytest.raises(CheckpointError, match="keep the one that the model was trained with"):
        ModelSpec.from_hf(config_of(keys))
