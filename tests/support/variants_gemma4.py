"""The tiny checkpoints of Gemma 4: bases, defaults and variants for `checkpoints`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.variants_llama_like import ABSENT, FULL, GROUPED, SLIDING, UNTIED

BASE: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 7,  # so that the sixth has full attention, and the last one must have it
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {**BASE, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97}
GEMMA4_UNIFIED: dict[str, Any] = {
    **BASE,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 8.0,
    "use_bidirectional_attention": "vision",
}
FAMILIES: dict[str, Any] = {
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM, GEMMA4),
    "gemma4-unified": (
        transformers.Gemma4UnifiedTextConfig,
        transformers.Gemma4UnifiedForCausalLM,
        GEMMA4_UNIFIED,
    ),
}
_ABSENT = """attention_bias attention_k_eq_v final_logit_softcapping global_head_dim head_dim hidden_activation
    layer_types num_global_key_value_heads num_key_value_heads num_kv_shared_layers per_layer_config rms_norm_eps
    rope_parameters sliding_window tie_word_embeddings use_bidirectional_attention use_double_wide_mlp""".split()
DEFAULTS: dict[str, list[str]] = {"gemma4": [*_ABSENT, "enable_moe_block"], "gemma4-unified": _ABSENT}
SHARED: dict[str, Any] = {  # the last three layers read the keys and values of the second and the fourth
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "num_hidden_layers": 7,
}
BY_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101}
THETAS = {
    FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 50.0},
}
PUBLISHED = {"per_layer_config": ABSENT, "num_global_key_value_heads": 4, "global_head_dim": 32}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {  # as in `variants_llama_like`
    "gemma4": {
        "k-eq-v": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "shared": {**SHARED, **BY_LAYER},
        "double-wide": {**SHARED, **BY_LAYER, "use_double_wide_mlp": True},
        "by-layer": {**BY_LAYER, "hidden_activation": "silu"},
        "published": {**PUBLISHED, "attention_k_eq_v": True},  # as Google writes the heads
        "equal-heads": {"global_head_dim": 16},
        "own-heads-ungated": {"num_global_key_value_heads": 1},
        "untied-biases": {**UNTIED, "attention_bias": True},
        "thetas": {"rope_parameters": THETAS, "rms_norm_eps": 1e-2},
    },
    "gemma4-unified": {"shared": {**SHARED, "use_double_wide_mlp": True}},
}


def fill(model: torch.nn.Module) -> None:
    """Draw the factors of layers, and halve queries and keys: no factor on scores does it, as in trained models."""
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.data.mul_(0.5)
