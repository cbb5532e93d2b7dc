"""Tiny checkpoints of the families with other norms, residuals and positions than Llama: bases and variants."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support.variants_llama_like import ABSENT, FULL, SLIDING

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
WINDOWED: dict[str, Any] = {**GROUPED, "num_hidden_layers": 5, "sliding_window": 24}  # the fourth is full
FAMILIES = {
    "cohere2": (
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {**WINDOWED, "pad_token_id": 0, "logit_scale": 0.3},
    ),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM, WINDOWED),
    "glm4": (
        transformers.Glm4Config,
        transformers.Glm4ForCausalLM,
        {**GROUPED, "head_dim": 16, "pad_token_id": 0},
    ),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {**SMALL, "n_inner": 96, "initializer_range": 0.3},
    ),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, WIDE),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, GROUPED),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, WINDOWED),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM, {**SMALL, "ffn_dim": 96, "init_std": 0.3}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, GROUPED),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, GROUPED),
    "starcoder2": (
        transformers.Starcoder2Config,
        transformers.Starcoder2ForCausalLM,
        {**GROUPED, "sliding_window": 24},
    ),
}
NESTED = {"olmo3"}  # families with rotary parameters of their own for windowed layers
OWN_HEADS = {"gpt2", "gpt_neox", "opt"}  # families whose query heads each have a key head
UNROTATED = {"gpt2", "opt"}  # families without rotary embeddings
# config keys that have a default
DEFAULTS: dict[str, list[str]] = {
    "cohere2": """attention_bias hidden_act layer_norm_eps layer_types logit_scale num_key_value_heads
        rope_parameters sliding_window tie_word_embeddings""".split(),
    "exaone4": """hidden_act layer_types num_key_value_heads rms_norm_eps rope_parameters sliding_window
        sliding_window_pattern tie_word_embeddings""".split(),
    "glm4": """attention_bias head_dim hidden_act num_key_value_heads rms_norm_eps rope_parameters
        tie_word_embeddings""".split(),
    "gpt2": """activation_function add_cross_attention layer_norm_epsilon n_inner scale_attn_by_inverse_layer_idx
        scale_attn_weights tie_word_embeddings""".split(),
    "gpt_neox": """attention_bias hidden_act layer_norm_eps rope_parameters tie_word_embeddings
        use_parallel_residual""".split(),
    "olmo2": """attention_bias hidden_act num_key_value_heads rms_norm_eps rope_parameters
        tie_word_embeddings""".split(),
    "olmo3": """attention_bias hidden_act layer_types num_key_value_heads rms_norm_eps rope_parameters
        sliding_window tie_word_embeddings""".split(),
    "opt": """_remove_final_layer_norm activation_function do_layer_norm_before enable_bias ffn_dim
        layer_norm_elementwise_affine tie_word_embeddings word_embed_proj_dim""".split(),
    "phi": """hidden_act layer_norm_eps num_key_value_heads qk_layernorm rope_parameters
        tie_word_embeddings""".split(),
    "stablelm": """hidden_act layer_norm_eps num_key_value_heads qk_layernorm rope_parameters
        tie_word_embeddings use_parallel_residual use_qkv_bias""".split(),
    "starcoder2": """hidden_act norm_epsilon num_key_value_heads rope_parameters sliding_window
        tie_word_embeddings use_bias""".split(),
}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
# every config variant that changes the arithmetic: its family, and the keys that differ from the base
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {}),
    "cohere2-untied-biases": (
        "cohere2",
        {"tie_word_embeddings": False, "attention_bias": True, "layer_norm_eps": 1e-2},
    ),
    "cohere2-pattern": ("cohere2", {"layer_types": ABSENT, "sliding_window_pattern": 2}),
    "cohere2-layer-types": ("cohere2", {"layer_types": [FULL, *[SLIDING] * 4], "logit_scale": 1.5}),
    "cohere2-gelu-theta": ("cohere2", {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": PLAIN}),
    "cohere2-absent": ("cohere2", {"num_attention_heads": 8}),
    "exaone4": ("exaone4", {}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": [FULL] * 5},
    ),
    "exaone4-layer-types": (
        "exaone4",
        {"sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL]},
    ),
    "exaone4-pattern": ("exaone4", {"layer_types": ABSENT, "sliding_window_pattern": 2}),
    "exaone4-tied-head-dim": (
        "exaone4",
        {"tie_word_embeddings": True, "head_dim": 24, "rms_norm_eps": 1e-2, "rope_parameters": PLAIN},
    ),
    "exaone4-absent": ("exaone4", {"hidden_size": 128, "num_attention_heads": 32}),
    "glm4": ("glm4", {}),
    "glm4-no-biases-tied": ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm4-whole-rotation": ("glm4", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
    "glm4-head-dim": ("glm4", {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-2}),
    "glm4-old-rope": (
        "glm4",
        {"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    "glm4-absent": ("glm4", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied-unscaled": ("gpt2", {"tie_word_embeddings": False, "scale_attn_weights": False}),
    "gpt2-gelu-upcast": (
        "gpt2",
        {"activation_function": "gelu", "reorder_and_upcast_attn": True, "layer_norm_epsilon": 1e-2},
    ),
    "gpt2-absent": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential-tied": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt_neox-no-biases": (
        "gpt_neox",
        {"attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-2},
    ),
    "gpt_neox-old-rope": (
        "gpt_neox",
        {"rope_parameters": ABSENT, "rotary_pct": 0.5, "rotary_emb_base": 500},
    ),
    "gpt_neox-absent": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2-head-dim": ("olmo2", {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-2}),
    "olmo2-theta": ("olmo2", {"rope_parameters": PLAIN}),
    "olmo2-absent": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "olmo3-layer-types": (
        "olmo3",
        {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING], "tie_word_embeddings": True},
    ),
    "olmo3-biases-gelu": (
        "olmo3",
        {"attention_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-2, "head_dim": 24},
    ),
    "olmo3-old-rope": (
        "olmo3",
        {
            "rope_parameters": ABSENT,
            "rope_theta": 500.0,
            "rope_scaling": {**YARN, "attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
        },
    ),
    "olmo3-one-base": (
        "olmo3",
        {"rope_parameters": {FULL: {**YARN, "rope_theta": 500.0}, SLIDING: PLAIN}},
    ),
    "olmo3-absent": ("olmo3", {}),
    "opt": ("opt", {}),
    "opt-no-biases-untied": ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    "opt-gelu": ("opt", {"activation_function": "gelu"}),
    "opt-sums-normed": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-projected-untied": ("opt", {"word_embed_proj_dim": 80, "tie_word_embeddings": False}),
    "opt-absent": ("opt", {}),
    "phi": ("phi", {}),
    "phi-head-norms": ("phi", {"qk_layernorm": True, "layer_norm_eps": 1e-2}),
    "phi-tied-gelu": ("phi", {"tie_word_embeddings": True, "hidden_act": "gelu", "num_key_value_heads": 4}),
    "phi-old-rope": (
        "phi",
        {"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    "phi-absent": ("phi", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-tied-gelu": (
        "stablelm",
        {"tie_word_embeddings": True, "hidden_act": "gelu", "layer_norm_eps": 1e-2},
    ),
    "stablelm-old-rope": (
        "stablelm",
        {"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "stablelm-head-norms": ("stablelm", {"qk_layernorm": True, "layer_norm_eps": 1e-2}),
    "stablelm-absent": ("stablelm", {"hidden_size": 256, "num_attention_heads": 32}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-no-window": ("starcoder2", {"sliding_window": None, "use_bias": False}),
    "starcoder2-untied-head-dim": (
        "starcoder2",
        {"tie_word_embeddings": False, "head_dim": 24, "hidden_act": "relu", "norm_epsilon": 1e-2},
    ),
    "starcoder2-theta": ("starcoder2", {"rope_parameters": PLAIN}),
    "starcoder2-absent": ("starcoder2", {}),
}
# sizes of test checkpoints that are no variants
SIZES = {"ffn_dim", "n_embd", "n_head", "n_inner", "n_layer", "n_positions", "init_std"}

# A value that differs from the default of the class or of the test checkpoints, for every further key that
# transformers reads in these families.
KEY_VALUES: dict[str, Any] = {
    "_remove_final_layer_norm": True,
    "activation_function": "gelu",
    "add_cross_attention": True,
    "attn_pdrop": 0.5,
    "classifier_dropout": 0.5,
    "do_layer_norm_before": False,
    "dropout": 0.5,
    "embd_pdrop": 0.5,
    "embedding_dropout": 0.5,
    "enable_bias": False,
    "ffn_dim": 48,
    "hidden_dropout": 0.5,
    "init_std": 0.2,
    "is_decoder": True,
    "layer_norm_elementwise_affine": False,
    "layer_norm_eps": 0.1,
    "layer_norm_epsilon": 0.1,
    "layerdrop": 0.5,
    "logit_scale": 0.7,
    "n_embd": 32,
    "n_head": 8,
    "n_inner": 48,
    "n_layer": 2,
    "n_positions": 512,
    "norm_epsilon": 0.1,
    "output_cross_attentions": True,
    "qk_layernorm": True,
    "reorder_and_upcast_attn": True,
    "resid_pdrop": 0.5,
    "residual_dropout": 0.5,
    "rotary_emb_base": 500.0,
    "rotary_pct": 0.5,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "summary_activation": "tanh",
    "summary_first_dropout": 0.5,
    "summary_proj_to_labels": False,
    "summary_type": "last",
    "summary_use_proj": False,
    "use_bias": False,
    "use_parallel_residual": True,
    "use_qkv_bias": True,
    "word_embed_proj_dim": 32,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
FIVE: dict[str, Any] = {"layer_types": [FULL, *[SLIDING] * 4], "sliding_window": 16}
# where a family needs another value
OWN_VALUES: dict[str, dict[str, Any]] = {
    "cohere2": {**FIVE, "tie_word_embeddings": False},
    "exaone4": FIVE,
    "glm4": {"attention_bias": False},
    "gpt2": {"tie_word_embeddings": False},
    "gpt_neox": {"attention_bias": False, "use_parallel_residual": False},
    "olmo3": {**FIVE, "rope_parameters": {FULL: LINEAR, SLIDING: LINEAR}},
    "opt": {"tie_word_embeddings": False},
    "starcoder2": {"sliding_window": 16, "tie_word_embeddings": False},
}
