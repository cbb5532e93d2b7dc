"""Ministral 3: a Mistral whose queries grow with their position."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, SLIDING, read_windows
from foredraft.model.rope_config import ROPE_KEYS, read_growing_rope

# the rotary parameters of a checkpoint that has none
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(read: ConfigReader) -> dict[str, Any]:
    if all(read.take(key) is None for key in ROPE_KEYS):
        read.config = {**read.config, ROPE_KEYS[0]: ROPE}
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    kind = FULL if window is None else SLIDING
    kv_heads = read.count("num_key_value_heads", 8, if_null=heads)
    rope, query_rope = read_growing_rope(read)
    head_dim = read.count("head_dim", 128, if_null=max(1, hidden // heads))
    return llama_like(read, kv_heads, head_dim, rope) | {
        "query_rope": query_rope,
        "windows": read_windows(read, {kind: window}, [kind]),
        "norm_eps": read.number("rms_norm_eps", 1e-5),
    }
