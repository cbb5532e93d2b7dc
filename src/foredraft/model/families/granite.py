"""Granite 3: a Llama with factors on embeddings, on what sub-layers add, on scores and on logits."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, read_head_dim, read_windows


def granite(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    kv_heads = read.count("num_key_value_heads", heads, if_null=heads)
    return llama_like(read, kv_heads, read_head_dim(read)) | {
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias", if_null=False),
        "attention_scale": read.number("attention_multiplier", 1.0),
        "embedding_scale": _unless_one(read.number("embedding_multiplier", 1.0)),
        "residual_scale": _unless_one(read.number("residual_multiplier", 1.0)),
        "logit_scale": _unless_one(1 / read.number("logits_scaling", 1.0)),  # logits are divided by it
    }


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor
