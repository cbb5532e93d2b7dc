"""OLMo 2 and OLMo 3: norms of the outputs of sub-layers, and of whole queries and keys."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import longest
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    head_sizes,
    read_activation,
    read_head_dim,
    read_windows,
)
from foredraft.model.rope_config import read_rope, read_ropes

OLMO3_THETA = 500_000.0  # the default rotary base of all layers


def olmo2(read: ConfigReader) -> dict[str, Any]:
    windows = read_windows(read, {FULL: None}, [FULL])
    return olmo(read) | {"rope": read_rope(read), "windows": windows, "longest": longest(read)}


def olmo3(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    rope, window_rope = read_ropes(read, OLMO3_THETA, OLMO3_THETA, window_key=None)
    return olmo(read) | {
        "rope": rope,
        "window_rope": window_rope,
        "windows": read_windows(read, {SLIDING: window, FULL: None}, [*[SLIDING] * 3, FULL]),
    }


def olmo(read: ConfigReader) -> dict[str, Any]:
    """Return the fields that OLMo 2 and OLMo 3 share."""
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    head_dim = read_head_dim(read)
    return head_sizes(read, read.count("num_key_value_heads", heads, if_null=heads), head_dim) | {
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
        "norm_eps": read.number("rms_norm_eps", 1e-5),
        "norm_float32": True,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "pre_norms": False,
        "post_norms": True,
        "projection_norms": True,
    }
