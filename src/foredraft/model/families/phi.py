"""Phi 3 and Phi 4: fused weights, a rotation of a part of each head, and LongRoPE."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, SLIDING, read_head_dim, read_windows
from foredraft.model.rope_config import read_rope

# the scaling types of the family; the two older names stand for longrope
KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def phi3(read: ConfigReader) -> dict[str, Any]:
    heads, head_dim = read.count("num_attention_heads"), read_head_dim(read)
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    kind = FULL if window is None else SLIDING
    rope = read_rope(read, head_dim=head_dim, original=4096, kinds=KINDS)
    return llama_like(read, read.count("num_key_value_heads", heads, if_null=heads), head_dim, rope) | {
        "windows": read_windows(read, {kind: window}, [kind]),
        "norm_eps": read.number("rms_norm_eps", 1e-5),
        "fused_qkv": True,
        "fused_gate_up": True,
    }
