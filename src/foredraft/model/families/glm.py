"""GLM-4: norms before and after sub-layers, and half of each head rotated, by neighbours."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import longest
from foredraft.model.families.shared import FULL, head_sizes, read_activation, read_windows
from foredraft.model.rope_config import read_rope
from foredraft.model.tensor_layouts import LLAMA_INNER, TensorLayout

GLM4 = TensorLayout(
    inner={
        **LLAMA_INNER,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "mlp.gate_up_proj": "mlp.gate_up_proj",
    },
)
ENDS = [151329, 151336, 151338]  # the default end-of-text ids


def glm4(read: ConfigReader) -> dict[str, Any]:
    head_dim = read.count("head_dim", 128)
    return head_sizes(read, read.count("num_key_value_heads", 2), head_dim) | {
        "rope": read_rope(read, head_dim=head_dim, share=0.5),
        "interleaved": True,
        "naming": GLM4,
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "longest": longest(read),
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
        "norm_eps": read.number("rms_norm_eps", 1.5625e-7),
        "qkv_bias": read.flag("attention_bias", default=True, if_null=False),
        "fused_gate_up": True,
        "post_norms": True,
    }
