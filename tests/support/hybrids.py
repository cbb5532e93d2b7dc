"""Small random hybrids, saved with transformers: gated delta nets, Mamba-2 or short convolutions, and attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# what differs between small models, beside their dtype
VARIANTS: dict[str, dict[str, Any]] = {
    "two values a key": {},
    "as many": {"linear_num_value_heads": 2, "linear_value_head_dim": 64},
    "wide": {"linear_key_head_dim": 16, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 3},
    "tied": {"tie_word_embeddings": True, "layer_types": ["linear_attention", "full_attention"] * 4},
    "rotated": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}
COMMON = {
    key: SIZES[key] for key in SIZES if "linear" not in key and key not in ("head_dim", "num_hidden_layers")
}
# the same of other kinds of recurrent layers, behind the class of their config
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "convolutions": ("Lfm2Config", {"num_hidden_layers": 6, "full_attn_idxs": [2, 5], "block_multiple_of": 16}),
    "five taps": (
        "Lfm2Config",
        {"num_hidden_layers": 4, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 5, "hidden_size": 80},
    ),
    "mamba": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "attention"] * 2, "num_local_experts": 0,
            "shared_intermediate_size": 96, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 32,
            "tie_word_embeddings": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
            "attention_multiplier": 0.2, "logits_scaling": 0.5,
        },
    ),
    "rotated mamba": (
        "GraniteMoeHybridConfig",
        {
            "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
            "shared_intermediate_size": 80, "mamba_n_heads": 8, "mamba_d_state": 48, "mamba_d_conv": 3,
            "position_embedding_type": "rope", "attention_multiplier": 0.25,
        },
    ),
    "blocks": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M-MM*-M-M*-", "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32,
            "n_groups": 2, "ssm_state_size": 32,
        },
    ),
    "blocks without MLP": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "*M-*MM", "head_dim": 32, "mamba_num_heads": 3, "mamba_head_dim": 48,
            "n_groups": 1, "ssm_state_size": 16, "mlp_bias": True,
        },
    ),
}  # fmt: skip


def config_of(variant: str, **keys: Any) -> Any:
    if variant in VARIANTS:
        return transformers.Qwen3_5TextConfig(**SIZES | VARIANTS[variant] | keys)
    name, own = OTHERS[variant]
    return getattr(transformers, name)(**COMMON | own | keys)


def save_hybrid(
    folder: Path, variant: str = "two values a key", *, dtype: str = "float32", seed: int = 0, **keys: Any
) -> Path:
    torch.manual_seed(seed)
    config = config_of(variant, **keys)
    model = filled(transformers.AutoModelForCausalLM.from_config(config))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def filled(model: Any) -> Any:
    """Let states neither vanish nor explode, so that every part of a model tells in its logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                weight.normal_(-1.0, 0.7)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.normal_(0.0, 0.6 if weight.dim() == 3 else 1.3 * weight.shape[-1] ** -0.5)
    return model


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
