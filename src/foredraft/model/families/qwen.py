"""Qwen 2 and Qwen 3."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, SLIDING, read_head_dim, read_window, read_windows


def qwen2(read: ConfigReader) -> dict[str, Any]:
    heads = read.count("num_attention_heads")
    return llama_like(read, read.count("num_key_value_heads", 32, if_null=heads), read_head_dim(read)) | {
        "windows": qwen_windows(read),
        "qkv_bias": True,
    }


def qwen3(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    kv_heads = read.count("num_key_value_heads", 32, if_null=heads)
    return llama_like(read, kv_heads, read.count("head_dim", 128)) | {
        "windows": qwen_windows(read),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "head_norms": True,
    }


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Qwen's windows: enabled by `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = read_window(read), read.count("max_window_layers", 28, allow_zero=True)
    if not read.flag("use_sliding_window") or window is None:
        return read_windows(read, {FULL: None}, [FULL])
    layers = read.count("num_hidden_layers")
    kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return read_windows(read, {FULL: None, SLIDING: window}, kinds)
