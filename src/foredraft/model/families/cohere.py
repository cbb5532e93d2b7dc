"""Cohere 2: attention and MLP side by side, and no rotation in layers with full attention."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    divided_head_dim,
    full_layers,
    head_sizes,
    read_activation,
    read_windows,
)
from foredraft.model.rope_config import read_rope


def cohere2(read: ConfigReader) -> dict[str, Any]:
    heads, head_dim = read.count("num_attention_heads"), divided_head_dim(read)
    attention_bias = read.flag("attention_bias", if_null=False)
    window, pattern = read.count("sliding_window", 4096), read.count("sliding_window_pattern", 4)
    windows = read_windows(read, {SLIDING: window, FULL: None}, [*[SLIDING] * (pattern - 1), FULL])
    return head_sizes(read, read.count("num_key_value_heads", heads, if_null=heads), head_dim) | {
        "rope": read_rope(read),
        "interleaved": True,
        "windows": windows,
        "unrotated": full_layers(windows),
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "logit_scale": read.number("logit_scale", 0.0625),
        "norm_eps": read.number("layer_norm_eps", 1e-5),
        "layer_norms": True,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "parallel_residual": True,
        "shared_norm": True,
    }
