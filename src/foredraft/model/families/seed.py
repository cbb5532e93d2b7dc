"""Seed-OSS: a Llama whose output projection has a switch of its own for its bias."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, read_windows


def seed_oss(read: ConfigReader) -> dict[str, Any]:
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    head_dim = read.count("head_dim", 128, if_null=max(1, hidden // heads))
    return llama_like(read, read.count("num_key_value_heads", 8, if_null=heads), head_dim) | {
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "qkv_bias": read.flag("attention_bias", default=True),
        "output_bias": read.flag("attention_out_bias", if_null=False),
        "mlp_bias": read.flag("mlp_bias", if_null=False),
    }
