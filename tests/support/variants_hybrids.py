"""Tiny configs of hybrids, whose layers are recurrent but for some, that `checkpoints` adds to its own."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.support.variants_llama_like import FULL, GROUPED, TIED, together

LINEAR = "linear_attention"
QWEN3_5: dict[str, Any] = {
    **GROUPED, "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
QWEN3_NEXT = {**QWEN3_5, "num_experts": 0}  # with experts, it is refused
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, QWEN3_5),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, QWEN3_NEXT),
}
SIZES = {key for key in QWEN3_5 if key.startswith("linear_")} | {"linear_conv_kernel_dim"}
DEFAULTS = together(
    """attention_bias full_attention_interval head_dim hidden_act layer_types linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim num_key_value_heads
    rms_norm_eps rope_parameters tie_word_embeddings""",
    {"qwen3_5": "", "qwen3_next": ""},
)
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_next": {
        "three-a-key": {"linear_num_value_heads": 6, "linear_value_head_dim": 48},
        "no-sparse-layer": {"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]},
        "absent": {"hidden_size": 128, "num_hidden_layers": 4},
    },
    "qwen3_5": {
        "as-many": {"linear_num_value_heads": 2, "linear_value_head_dim": 64},
        "three-a-key": {"linear_num_value_heads": 6},
        "wide": {"linear_key_head_dim": 16, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 3},
        "tied": {**TIED, "layer_types": [LINEAR, FULL] * 2},
        "interval": {"full_attention_interval": 2},
        "rotated": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        },
        "biases-eps": {"attention_bias": True, "rms_norm_eps": 1e-1},
        "absent": {"hidden_size": 128, "num_hidden_layers": 4},
    },
}
KEY_VALUES: dict[str, Any] = {  # other values of keys that only these have, as in test_keys
    "full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 6, "linear_value_head_dim": 16,
    "number_of_conv_states": 2, "decoder_sparse_step": 2, "mlp_only_layers": [0], "moe_intermediate_size": 8,
    "norm_topk_prob": False, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
LAYERS: dict[str, Any] = {"layer_types": [FULL, LINEAR, FULL, LINEAR], "num_hidden_layers": 5}
OWN_VALUES: dict[str, dict[str, Any]] = {"qwen3_5": LAYERS, "qwen3_next": LAYERS | {"num_experts": 0}}


def fill(model: torch.nn.Module) -> None:
    """Draw weights with which states neither vanish nor explode, so that every part of it tells in the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                weight.normal_(-1.0, 0.7)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.normal_(0.0, 0.6 if weight.dim() == 3 else 1.3 * weight.shape[-1] ** -0.5)
