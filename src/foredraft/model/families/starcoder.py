"""StarCoder 2: layer norms and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    head_sizes,
    read_activation,
    read_head_dim,
    read_windows,
)
from foredraft.model.rope_config import read_rope
from foredraft.model.tensor_layouts import LLAMA_INNER, TensorLayout

STARCODER2 = TensorLayout(
    inner={**LLAMA_INNER, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
)


def starcoder2(read: ConfigReader) -> dict[str, Any]:
    head_dim, biases = read_head_dim(read), read.flag("use_bias", default=True)
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    kind = FULL if window is None else SLIDING
    return head_sizes(read, read.count("num_key_value_heads", 2), head_dim) | {
        "rope": read_rope(read),
        "windows": read_windows(read, {kind: window}, [kind]),
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "norm_eps": read.number("norm_epsilon", 1e-5),
        "layer_norms": True,
        "norm_bias": True,
        "gated": False,
        "naming": STARCODER2,
        "qkv_bias": biases,
        "output_bias": biases,
        "mlp_bias": biases,
    }
