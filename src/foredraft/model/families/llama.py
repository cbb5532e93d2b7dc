"""Llama and Mistral, and the fields that the families after Llama share."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    head_sizes,
    read_activation,
    read_head_dim,
    read_window,
    read_windows,
)
from foredraft.model.rope import Rope
from foredraft.model.rope_config import read_rope


def llama(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    return llama_like(read, read.count("num_key_value_heads", heads, if_null=heads), read_head_dim(read)) | {
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias", if_null=False),
        "longest": longest(read),
    }


def longest(read: ConfigReader) -> int | None:
    """Return the length up to which `sliding_window` changes nothing; None is any length.

    A Llama of transformers attends to the whole prompt, but while it decodes its cache keeps one window. Past
    that length its text depends on how the prompt was passed, so there is nothing to be equal to.
    """
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    return window if read.take("layer_types") is None else None


def mistral(read: ConfigReader) -> dict[str, Any]:
    heads, window = read.count("num_attention_heads"), read_window(read)
    kind = FULL if window is None else SLIDING
    return llama_like(read, read.count("num_key_value_heads", 8, if_null=heads), read_head_dim(read)) | {
        "windows": read_windows(read, {FULL: None, kind: window}, [kind]),
    }


def llama_like(read: ConfigReader, kv_heads: int, head_dim: int, rope: Rope | None = None) -> dict[str, Any]:
    """Return the fields that the families after Llama share; `rope` is one that is read already."""
    return head_sizes(read, kv_heads, head_dim) | {
        "rope": read_rope(read) if rope is None else rope,
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
    }
