"""Small random hybrids, saved with transformers: gated delta nets, and attention at every fourth layer."""

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


def save_hybrid(
    folder: Path, variant: str = "two values a key", *, dtype: str = "float32", seed: int = 0, **keys: Any
) -> Path:
    """Save a model whose states neither vanish nor explode, so that every part of it tells in its logits."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig(**SIZES | VARIANTS[variant] | keys)
    model = transformers.Qwen3_5ForCausalLM(config)
    _draw(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def _draw(model: Any) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                weight.normal_(-1.0, 0.7)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
            else:
                weight.normal_(0.0, 0.6 if weight.dim() == 3 else 1.3 * weight.shape[-1] ** -0.5)


def add_mtp(folder: Path, *, seed: int = 1) -> Any:
    """Add a random layer that predicts further tokens to a model; return it as a model of one layer, with its `fc`."""
    torch.manual_seed(seed)
    config = transformers.Qwen3_5TextConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types, config.tie_word_embeddings = 1, ["full_attention"], False
    model = transformers.Qwen3_5ForCausalLM(config)
    model.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    kind = type(model.model.norm)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        setattr(model, name, kind(config.hidden_size, config.rms_norm_eps))
    _draw(model)
    model.to(config.dtype).eval()
    own = {
        f"mtp.{name.removeprefix('model.')}": weight.detach().clone()
        for name, weight in model.named_parameters()
        if "embed_tokens" not in name and "lm_head" not in name
    }
    rewrite(folder, lambda tensors: tensors | own)
    return model


def rewrite(folder: Path, change: Any) -> None:
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
