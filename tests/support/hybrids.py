"""Small random hybrids, saved with transformers: gated delta nets, and attention at every fourth layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import tiny_tokenizer
from tests.support.variants_hybrids import fill

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


def save_hybrid(
    folder: Path, variant: str = "two values a key", *, dtype: str = "float32", seed: int = 0, **keys: Any
) -> Path:
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(**SIZES | VARIANTS[variant] | keys)
    model = transformers.Qwen3_5ForCausalLM(config)
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
