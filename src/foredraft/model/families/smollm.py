"""SmolLM 3: a Llama that leaves queries and keys unrotated in some layers (NoPE, arXiv:2305.19466)."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import llama_like
from foredraft.model.families.shared import FULL, SLIDING, read_head_dim, read_windows
from foredraft.model.rope_config import read_rope

THETA = 2_000_000.0  # the rotary base of a checkpoint that names none


def smollm3(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    kv_heads = read.count("num_key_value_heads", 4, if_null=heads)
    unrotated = read_unrotated(read)
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    used = read.flag("use_sliding_window") and window is not None
    kinds = [
        SLIDING if used and layer in unrotated else FULL for layer in range(read.count("num_hidden_layers"))
    ]
    known: dict[str, int | None] = {FULL: None} if window is None else {FULL: None, SLIDING: window}
    return llama_like(read, kv_heads, read_head_dim(read), read_rope(read, THETA)) | {
        "unrotated": unrotated,
        "windows": read_windows(read, known, kinds),
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias", if_null=False),
    }


def read_unrotated(read: ConfigReader) -> tuple[int, ...]:
    """Return the layers without rotation: those with a 0 in a list, or else the last of each interval."""
    layers, interval = read.count("num_hidden_layers"), read.count("no_rope_layer_interval", 4)
    listed = read.take("no_rope_layers")
    if listed is None:
        listed = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        raise read.error("no_rope_layers", f"it must hold a 1 or a 0 for each of the {layers} layers")
    return tuple(layer for layer in range(layers) if not listed[layer])
