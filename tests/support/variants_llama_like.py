"""Tiny configs of families after Llama, and of Gemma 4, that `checkpoints` adds to its own: bases, defaults and variants."""

from __future__ import annotations

from typing import Any

import torch
import transformers

ABSENT = object()  # the value of a key that is not in config.json, and has the default of transformers
FULL, SLIDING = "full_attention", "sliding_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = {**SMALL, "intermediate_size": 96, "initializer_range": 0.3}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 24, "pad_token_id": 0}
GRANITE_FACTORS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
GRANITE = {**GROUPED, **GRANITE_FACTORS, "attention_multiplier": 0.125}
MINISTRAL = {**GROUPED, "head_dim": 16, "sliding_window": 24}  # transformers needs head_dim here
GROWTH: dict[str, Any] = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32}
MINISTRAL3: dict[str, Any] = {
    **GEMMA,
    "initializer_range": 0.2,  # growing queries amplify rounding
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **GROWTH},
}
PHI3 = {**GROUPED, "pad_token_id": 0}
SEED_OSS = {**GROUPED, "head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0}
SMOLLM3: dict[str, Any] = {
    **PHI3,
    "num_hidden_layers": 5,  # the fourth is not rotated
    "initializer_range": 0.2,  # five layers amplify rounding more than three
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, GEMMA),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, GRANITE),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM, MINISTRAL),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM, MINISTRAL3),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, PHI3),
    "seed-oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM, SEED_OSS),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, SMOLLM3),
}


def together(common: str, more: dict[str, str]) -> dict[str, list[str]]:
    return {family: f"{common} {own}".split() for family, own in more.items()}


# config keys that have a default
COMMON = "hidden_act num_key_value_heads rms_norm_eps rope_parameters tie_word_embeddings"
_DEFAULTS = {  # beside COMMON
    "gemma": "attention_bias head_dim use_bidirectional_attention",
    "granite": """attention_bias attention_multiplier embedding_multiplier logits_scaling mlp_bias
        residual_multiplier""",
    "ministral": "layer_types sliding_window",
    "ministral3": "head_dim sliding_window",
    "phi3": "original_max_position_embeddings sliding_window",
    "seed-oss": "attention_bias attention_out_bias head_dim mlp_bias",
    "smollm3": """attention_bias layer_types mlp_bias no_rope_layer_interval no_rope_layers sliding_window
        use_sliding_window""",
}
DEFAULTS = together(COMMON, _DEFAULTS)
# keys that a family needs beside those of every scaling type
IN_ROPE: dict[str, dict[str, Any]] = {"ministral3": GROWTH}
UNSCALED = {"phi3"}  # transformers refuses the common scaling types in these families


def longrope(pairs: int, original: int, **keys: Any) -> dict[str, Any]:
    factors = {
        "short_factor": [1.0 + pair / 8 for pair in range(pairs)],
        "long_factor": [1.5 + pair for pair in range(pairs)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 500.0, **factors, **keys}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def theta_eps(eps: float = 1e-1) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": eps}


def outside(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": ABSENT, "rope_theta": 500.0, **keys}


GELU, UNTIED = {"hidden_act": "gelu_pytorch_tanh"}, {"tie_word_embeddings": False}
TIED, WINDOWS = {"tie_word_embeddings": True}, {"use_sliding_window": True, "sliding_window": 24}
OLD_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 3.0] * 4}
YARN_MSCALE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0}
YARN_MSCALE |= {"mscale": 1.0, "mscale_all_dim": 0.5}
# family -> the end of a variant's name -> the keys that differ from the base; every family also has a variant without
# any, and one without the keys in DEFAULTS, whose further keys are those of "absent"
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "gemma": {
        "mqa": {"num_key_value_heads": 1},
        "untied-biases": {**UNTIED, "attention_bias": True},
        "gelu": {"hidden_act": "gelu"},  # which stands for the approximation by tanh
        "silu": {"hidden_act": "silu"},
        "theta-eps": theta_eps(),
        "absent": {"num_attention_heads": 16},
    },
    "granite": {
        "tied": TIED,
        "biases": {"attention_bias": True, "mlp_bias": True},
        "other-factors": {"embedding_multiplier": 3.3, "residual_multiplier": 1.7, "logits_scaling": 0.3},
        "gelu": GELU,
        "theta-eps": theta_eps(),
    },
    "ministral": {
        "layer-types": {"layer_types": [SLIDING, FULL, SLIDING]},
        "head-dim-tied": {"head_dim": 24, **TIED},
        "gelu": GELU,
        "theta-eps": theta_eps(),
        "absent": {"num_attention_heads": 8},
    },
    "ministral3": {
        "window": {"sliding_window": 24},
        "tied": TIED,
        "yarn-mscale": {"rope_parameters": {**YARN_MSCALE, **GROWTH}},
        "gelu": {**GELU, "rms_norm_eps": 1e-1},
        "absent": {"num_attention_heads": 8},
    },
    "phi3": {
        "tied-window": {**TIED, "sliding_window": 24},
        "partial": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
        },
        "partial-outside": outside(partial_rotary_factor=0.5),
        "longrope-long": longrope(8, original=16),
        "longrope-short": longrope(8, original=512),
        "longrope-partial": longrope(6, original=16, partial_rotary_factor=0.75),
        "longrope-factor": longrope(8, original=16, factor=3.0),
        "longrope-attention-factor": longrope(8, original=512, attention_factor=0.8),
        "old-longrope": outside(original_max_position_embeddings=16, rope_scaling=OLD_LONGROPE),
        "gelu-eps": {**GELU, "rms_norm_eps": 1e-1},
    },
    "seed-oss": {
        "output-bias": {"attention_out_bias": True, "mlp_bias": True},
        "no-bias-tied": {"attention_bias": False, **TIED},
        "gelu": GELU,
        "theta-eps": theta_eps(),
        "absent": {"num_attention_heads": 8},
    },
    "smollm3": {
        "listed": {"no_rope_layers": [0, 1, 0, 0, 1]},
        "interval": {"no_rope_layers": ABSENT, "no_rope_layer_interval": 2},
        "windows": {**WINDOWS, "layer_types": ABSENT, "no_rope_layers": [1, 0, 1, 1, 0]},
        "layer-types": {**WINDOWS, "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL]},
        "untied-biases": {**UNTIED, "attention_bias": True, "mlp_bias": True},
        "gelu": GELU,
        "theta-eps": theta_eps(),
    },
}

GEMMA4_BASE: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 7,  # so that the sixth has full attention, and the last one must have it
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {**GEMMA4_BASE, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97}
GEMMA4_UNIFIED: dict[str, Any] = {
    **GEMMA4_BASE,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 8.0,
    "use_bidirectional_attention": "vision",
}
GEMMA4_FAMILIES: dict[str, Any] = {
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
DEFAULTS |= {"gemma4": [*_ABSENT, "enable_moe_block"], "gemma4-unified": _ABSENT}
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
CHANGES |= {
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
UNSCALED |= {*GEMMA4_FAMILIES}


def fill_gemma4(model: torch.nn.Module) -> None:
    """Draw the factors of layers, and halve queries and keys: no factor on scores does it, as in trained models."""
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.data.mul_(0.5)
