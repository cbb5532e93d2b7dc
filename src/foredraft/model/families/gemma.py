"""Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import FULL, SLIDING, head_sizes, read_activation, read_windows
from foredraft.model.rope_config import read_rope, read_ropes


def gemma(read: ConfigReader) -> dict[str, Any]:
    heads, head_dim = read.count("num_attention_heads"), read.count("head_dim", 256)
    attention_bias = read.flag("attention_bias", if_null=False)
    if read.take("hidden_act") == "gelu":  # in this family it stands for the approximation by tanh
        read.config = {**read.config, "hidden_act": "gelu_pytorch_tanh"}
    return head_sizes(read, read.count("num_key_value_heads", 16, if_null=heads), head_dim) | {
        "rope": read_rope(read),
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "norm_offset": True,
    }


def gemma2(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    if read.take("sliding_window_size") not in (None, window):  # the name that exllamav2 reads, too
        raise read.error("sliding_window_size", f"it must equal sliding_window, {window}")
    return gemma_common(read) | {
        "rope": read_rope(read),
        "windows": read_windows(read, {SLIDING: window, FULL: None}, [SLIDING, FULL]),
        "attention_softcap": read.optional_number("attn_logit_softcapping", 50.0),
        "logit_softcap": read.optional_number("final_logit_softcapping", 30.0),
    }


def gemma3(read: ConfigReader) -> dict[str, Any]:
    rope, window_rope = read_ropes(read)
    return gemma_common(read) | {
        "rope": rope,
        "window_rope": window_rope,
        "windows": gemma3_windows(read),
        "logit_softcap": read.optional_number("final_logit_softcapping"),
        "head_norms": True,
    }


def gemma_common(read: ConfigReader) -> dict[str, Any]:
    """Return the fields that Gemma 2 and Gemma 3 share."""
    attention_bias = read.flag("attention_bias", if_null=False)
    return head_sizes(read, read.count("num_key_value_heads", 4), read.count("head_dim", 256)) | {
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "activation": read_activation(read, "hidden_activation", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "norm_offset": True,
        "post_norms": True,
    }


def gemma3_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Gemma 3's windows: full attention in every sixth layer, or every `sliding_window_pattern`-th."""
    pattern = read.count("sliding_window_pattern", 6)
    kinds = [
        FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(read.count("num_hidden_layers"))
    ]
    listed = read.take("layer_types")
    if "sliding_window_pattern" in read.config and listed not in (None, kinds):
        raise read.error("sliding_window_pattern", "layer_types differs from it; keep the key that is right")
    return read_windows(read, {SLIDING: read.count("sliding_window", 4096), FULL: None}, kinds)
