"""Tiny checkpoints of the families with other norms, residuals and positions than Llama: bases and variants."""

from __future__ import annotations

from typing import Any

import transformers

from tests.support import variants_llama_like
from tests.support.variants_llama_like import ABSENT, FULL, GELU, GROUPED, SLIDING, SMALL, TIED, UNTIED, WIDE

outside = variants_llama_like.outside
WINDOWED: dict[str, Any] = {**GROUPED, "num_hidden_layers": 5, "sliding_window": 24}  # the fourth is full
COHERE2 = {**WINDOWED, "pad_token_id": 0, "logit_scale": 0.3}
GLM4 = {**GROUPED, "head_dim": 16, "pad_token_id": 0}
GPT2 = {**SMALL, "n_inner": 96, "initializer_range": 0.3}
STARCODER2 = {**GROUPED, "sliding_window": 24}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM, COHERE2),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM, WINDOWED),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, GLM4),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, WIDE),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, GROUPED),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, WINDOWED),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM, {**SMALL, "ffn_dim": 96, "init_std": 0.3}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, GROUPED),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, GROUPED),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, STARCODER2),
}
NESTED = {"olmo3"}  # families with rotary parameters of their own for windowed layers
OWN_HEADS = {"gpt2", "gpt_neox", "opt"}  # families whose query heads each have a key head
UNROTATED = {"gpt2", "opt"}  # families without rotary embeddings
# config keys that have a default
COMMON = "hidden_act num_key_value_heads rope_parameters tie_word_embeddings"
_DEFAULTS = {
    "cohere2": "attention_bias layer_norm_eps layer_types logit_scale sliding_window",
    "exaone4": "layer_types rms_norm_eps sliding_window sliding_window_pattern",
    "glm4": "attention_bias head_dim rms_norm_eps",
    "olmo2": "attention_bias rms_norm_eps",
    "olmo3": "attention_bias layer_types rms_norm_eps sliding_window",
    "phi": "layer_norm_eps qk_layernorm",
    "stablelm": "layer_norm_eps qk_layernorm use_parallel_residual use_qkv_bias",
    "starcoder2": "norm_epsilon sliding_window use_bias",
}
DEFAULTS = {
    **variants_llama_like.together(COMMON, _DEFAULTS),
    "gpt2": """activation_function add_cross_attention layer_norm_epsilon n_inner scale_attn_by_inverse_layer_idx
        scale_attn_weights tie_word_embeddings""".split(),
    "gpt_neox": """attention_bias hidden_act layer_norm_eps rope_parameters tie_word_embeddings
        use_parallel_residual""".split(),
    "opt": """_remove_final_layer_norm activation_function do_layer_norm_before enable_bias ffn_dim
        layer_norm_elementwise_affine tie_word_embeddings word_embed_proj_dim""".split(),
}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {  # as in `variants_llama_like`
    "cohere2": {
        "untied-biases": {**UNTIED, "attention_bias": True, "layer_norm_eps": 1e-2},
        "pattern": {"layer_types": ABSENT, "sliding_window_pattern": 2},
        "layer-types": {"layer_types": [FULL, *[SLIDING] * 4], "logit_scale": 1.5},
        "gelu-theta": {**GELU, "rope_parameters": PLAIN},
        "absent": {"num_attention_heads": 8},
    },
    "exaone4": {
        "no-window": {"sliding_window": None, "sliding_window_pattern": None, "layer_types": [FULL] * 5},
        "layer-types": {"sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL, SLIDING, FULL, FULL]},
        "pattern": {"layer_types": ABSENT, "sliding_window_pattern": 2},
        "tied-head-dim": {**TIED, "head_dim": 24, "rms_norm_eps": 1e-2, "rope_parameters": PLAIN},
        "absent": {"hidden_size": 128, "num_attention_heads": 32},
    },
    "glm4": {
        "no-biases-tied": {"attention_bias": False, **TIED},
        "whole-rotation": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}},
        "head-dim": {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
        "old-rope": outside(partial_rotary_factor=0.25),
    },
    "gpt2": {
        "untied-unscaled": {**UNTIED, "scale_attn_weights": False},
        "gelu-upcast": {
            "activation_function": "gelu",
            "reorder_and_upcast_attn": True,
            "layer_norm_epsilon": 1e-2,
        },
    },
    "gpt_neox": {
        "sequential-tied": {"use_parallel_residual": False, **TIED},
        "no-biases": {"attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-2},
        "old-rope": {"rope_parameters": ABSENT, "rotary_pct": 0.5, "rotary_emb_base": 500},
    },
    "olmo2": {
        "biases-tied": {"attention_bias": True, **TIED},
        "head-dim": {"head_dim": 24, "hidden_act": "gelu", "rms_norm_eps": 1e-2},
        "theta": {"rope_parameters": PLAIN},
    },
    "olmo3": {
        "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING], **TIED},
        "biases-gelu": {"attention_bias": True, "hidden_act": "gelu", "rms_norm_eps": 1e-2, "head_dim": 24},
        "old-rope": outside(
            rope_scaling={**YARN, "attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0}
        ),
        "one-base": {"rope_parameters": {FULL: {**YARN, "rope_theta": 500.0}, SLIDING: PLAIN}},
    },
    "opt": {
        "no-biases-untied": {"enable_bias": False, **UNTIED},
        "gelu": {"activation_function": "gelu"},
        "sums-normed": {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
        "projected-untied": {"word_embed_proj_dim": 80, **UNTIED},
    },
    "phi": {
        "head-norms": {"qk_layernorm": True, "layer_norm_eps": 1e-2},
        "tied-gelu": {**TIED, "hidden_act": "gelu", "num_key_value_heads": 4},
        "old-rope": outside(partial_rotary_factor=0.25),
    },
    "stablelm": {
        "parallel": {"use_parallel_residual": True, "use_qkv_bias": True},
        "tied-gelu": {**TIED, "hidden_act": "gelu", "layer_norm_eps": 1e-2},
        "old-rope": outside(partial_rotary_factor=0.5),
        "head-norms": {"qk_layernorm": True, "layer_norm_eps": 1e-2},
        "absent": {"hidden_size": 256, "num_attention_heads": 32},
    },
    "starcoder2": {
        "no-window": {"sliding_window": None, "use_bias": False},
        "untied-head-dim": {**UNTIED, "head_dim": 24, "hidden_act": "relu", "norm_epsilon": 1e-2},
        "theta": {"rope_parameters": PLAIN},
    },
}
# sizes of test checkpoints that are no variants
SIZES = {"ffn_dim", "n_embd", "n_head", "n_inner", "n_layer", "n_positions", "init_std"}

# A value that differs from the default of the class or of the test checkpoints, for every further key that
# transformers reads in these families.
KEY_VALUES: dict[str, Any] = {
    **dict.fromkeys(
        """_remove_final_layer_norm add_cross_attention is_decoder output_cross_attentions qk_layernorm
        reorder_and_upcast_attn scale_attn_by_inverse_layer_idx use_parallel_residual use_qkv_bias""".split(),
        True,
    ),
    **dict.fromkeys(
        """do_layer_norm_before enable_bias layer_norm_elementwise_affine scale_attn_weights
        summary_proj_to_labels summary_use_proj use_bias""".split(),
        False,
    ),
    **dict.fromkeys(
        """attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout hidden_dropout layerdrop
        resid_pdrop residual_dropout rotary_pct summary_first_dropout""".split(),
        0.5,
    ),
    **dict.fromkeys(["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"], 0.1),
}
KEY_VALUES |= {"activation_function": "gelu", "summary_activation": "tanh", "summary_type": "last"}
KEY_VALUES |= {"ffn_dim": 48, "n_embd": 32, "n_head": 8, "n_inner": 48, "n_layer": 2, "n_positions": 512}
KEY_VALUES |= {"init_std": 0.2, "logit_scale": 0.7, "rotary_emb_base": 500.0, "word_embed_proj_dim": 32}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
FIVE: dict[str, Any] = {"layer_types": [FULL, *[SLIDING] * 4], "sliding_window": 16}
# where a family needs another value
OWN_VALUES: dict[str, dict[str, Any]] = {
    "cohere2": {**FIVE, **UNTIED},
    "exaone4": FIVE,
    "glm4": {"attention_bias": False},
    "gpt2": UNTIED,
    "gpt_neox": {"attention_bias": False, "use_parallel_residual": False},
    "olmo3": {**FIVE, "rope_parameters": {FULL: LINEAR, SLIDING: LINEAR}},
    "opt": UNTIED,
    "starcoder2": {"sliding_window": 16, **UNTIED},
}
