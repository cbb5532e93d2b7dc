"""Tiny configs of families after Llama that `checkpoints` adds to its own: bases, defaults and variants."""

from __future__ import annotations

from typing import Any

import transformers

ABSENT = object()  # the value of a key that is not in config.json, and has the default of transformers
FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
GEMMA: dict[str, Any] = {**BASE, "head_dim": 24, "pad_token_id": 0}
GRANITE: dict[str, Any] = {
    **BASE,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}
MINISTRAL: dict[str, Any] = {
    **BASE,
    "head_dim": 16,  # transformers needs it here
    "sliding_window": 24,
}
GROWTH: dict[str, Any] = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 32}
MINISTRAL3: dict[str, Any] = {
    **BASE,
    "initializer_range": 0.2,  # growing queries amplify rounding
    "head_dim": 24,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **GROWTH},
}
PHI3: dict[str, Any] = {**BASE, "pad_token_id": 0}
SEED_OSS: dict[str, Any] = {**BASE, "head_dim": 24, "attention_dropout": 0.0, "residual_dropout": 0.0}
SMOLLM3: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 5,  # the fourth is not rotated
    "pad_token_id": 0,
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
DEFAULTS: dict[str, list[str]] = {
    "gemma": """attention_bias head_dim hidden_act num_key_value_heads rms_norm_eps rope_parameters
        tie_word_embeddings use_bidirectional_attention""".split(),
    "granite": """attention_bias attention_multiplier embedding_multiplier hidden_act logits_scaling mlp_bias
        num_key_value_heads residual_multiplier rms_norm_eps rope_parameters tie_word_embeddings""".split(),
    "ministral": """hidden_act layer_types num_key_value_heads rms_norm_eps rope_parameters sliding_window
        tie_word_embeddings""".split(),
    "ministral3": """head_dim hidden_act num_key_value_heads rms_norm_eps rope_parameters sliding_window
        tie_word_embeddings""".split(),
    "phi3": """hidden_act num_key_value_heads original_max_position_embeddings rms_norm_eps rope_parameters
        sliding_window tie_word_embeddings""".split(),
    "seed-oss": """attention_bias attention_out_bias head_dim hidden_act mlp_bias num_key_value_heads rms_norm_eps
        rope_parameters tie_word_embeddings""".split(),
    "smollm3": """attention_bias hidden_act layer_types mlp_bias no_rope_layer_interval no_rope_layers
        num_key_value_heads rms_norm_eps rope_parameters sliding_window tie_word_embeddings
        use_sliding_window""".split(),
}
# keys that a family needs beside those of every scaling type
IN_ROPE: dict[str, dict[str, Any]] = {"ministral3": GROWTH}
UNSCALED = {"phi3"}  # transformers refuses the common scaling types in these families


def longrope(pairs: int, original: int, **keys: Any) -> dict[str, Any]:
    """Return the config keys of LongRoPE over so many pairs of channels."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + pair / 8 for pair in range(pairs)],
        "long_factor": [1.5 + pair for pair in range(pairs)],
        **keys,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


THETA_EPS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma-mqa": ("gemma", {"num_key_value_heads": 1}),
    "gemma-untied-biases": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma-gelu": ("gemma", {"hidden_act": "gelu"}),  # which stands for the approximation by tanh
    "gemma-silu": ("gemma", {"hidden_act": "silu"}),
    "gemma-theta-eps": ("gemma", THETA_EPS),
    "gemma-absent": ("gemma", {"num_attention_heads": 16}),
    "granite": ("granite", {}),
    "granite-tied": ("granite", {"tie_word_embeddings": True}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite-other-factors": (
        "granite",
        {"embedding_multiplier": 3.3, "residual_multiplier": 1.7, "logits_scaling": 0.3},
    ),
    "granite-gelu": ("granite", {"hidden_act": "gelu_pytorch_tanh"}),
    "granite-theta-eps": ("granite", THETA_EPS),
    "granite-absent": ("granite", {}),
    "ministral": ("ministral", {}),
    "ministral-layer-types": ("ministral", {"layer_types": [SLIDING, FULL, SLIDING]}),
    "ministral-head-dim-tied": ("ministral", {"head_dim": 24, "tie_word_embeddings": True}),
    "ministral-gelu": ("ministral", {"hidden_act": "gelu_pytorch_tanh"}),
    "ministral-theta-eps": ("ministral", THETA_EPS),
    "ministral-absent": ("ministral", {"num_attention_heads": 8}),
    "ministral3": ("ministral3", {}),
    "ministral3-window": ("ministral3", {"sliding_window": 24}),
    "ministral3-tied": ("ministral3", {"tie_word_embeddings": True}),
    "ministral3-yarn-mscale": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                **GROWTH,
            }
        },
    ),
    "ministral3-gelu": ("ministral3", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-1}),
    "ministral3-absent": ("ministral3", {"num_attention_heads": 8}),
    "phi3": ("phi3", {}),
    "phi3-tied-window": ("phi3", {"tie_word_embeddings": True, "sliding_window": 24}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}},
    ),
    "phi3-partial-outside": (
        "phi3",
        {"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "phi3-longrope-long": ("phi3", longrope(8, original=16)),
    "phi3-longrope-short": ("phi3", longrope(8, original=512)),
    "phi3-longrope-partial": ("phi3", longrope(6, original=16, partial_rotary_factor=0.75)),
    "phi3-longrope-factor": ("phi3", longrope(8, original=16, factor=3.0)),
    "phi3-longrope-attention-factor": ("phi3", longrope(8, original=512, attention_factor=0.8)),
    "phi3-old-longrope": (
        "phi3",
        {
            "rope_parameters": ABSENT,
            "rope_theta": 500.0,
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 3.0] * 4},
        },
    ),
    "phi3-gelu-eps": ("phi3", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-1}),
    "phi3-absent": ("phi3", {}),
    "seed-oss": ("seed-oss", {}),
    "seed-oss-output-bias": ("seed-oss", {"attention_out_bias": True, "mlp_bias": True}),
    "seed-oss-no-bias-tied": ("seed-oss", {"attention_bias": False, "tie_word_embeddings": True}),
    "seed-oss-gelu": ("seed-oss", {"hidden_act": "gelu_pytorch_tanh"}),
    "seed-oss-theta-eps": ("seed-oss", THETA_EPS),
    "seed-oss-absent": ("seed-oss", {"num_attention_heads": 8}),
    "smollm3": ("smollm3", {}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0, 0, 1]}),
    "smollm3-interval": ("smollm3", {"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}),
    "smollm3-windows": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ABSENT,
            "no_rope_layers": [1, 0, 1, 1, 0],
        },
    ),
    "smollm3-layer-types": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL],
        },
    ),
    "smollm3-untied-biases": (
        "smollm3",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3-gelu": ("smollm3", {"hidden_act": "gelu_pytorch_tanh"}),
    "smollm3-theta-eps": ("smollm3", THETA_EPS),
    "smollm3-absent": ("smollm3", {}),
}
