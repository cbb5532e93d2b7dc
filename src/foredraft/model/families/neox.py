"""GPT-NeoX, StableLM and Phi-1: layer norms, and heads that are rotated in part."""

from __future__ import annotations

import functools
from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import longest
from foredraft.model.families.shared import (
    FULL,
    divided_head_dim,
    head_sizes,
    own_heads,
    read_activation,
    read_head_dim,
    read_windows,
)
from foredraft.model.rope_config import read_rope
from foredraft.model.tensor_layouts import EMBEDDING, LAST_NORM, LLAMA_INNER, TensorLayout

NEOX = TensorLayout(
    prefixes=("gpt_neox.",),
    outer={"embed_in": EMBEDDING, "final_layer_norm": LAST_NORM},
    inner={
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "attention.query_key_value": "self_attn.qkv_proj",
        "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    },
    heads=("embed_out", "lm_head"),
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)
PHI = TensorLayout(
    outer={"embed_tokens": EMBEDDING, "final_layernorm": LAST_NORM},
    inner={
        **LLAMA_INNER,
        "self_attn.dense": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
)


def gpt_neox(read: ConfigReader) -> dict[str, Any]:
    head_dim, attention_bias = (
        divided_head_dim(read),
        read.flag("attention_bias", default=True, if_null=False),
    )
    rope = read_rope(read, head_dim=head_dim, share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct")
    return normed(read, own_heads(read), head_dim) | {
        "rope": rope,
        "activation": read_activation(read, "hidden_act", default="gelu"),
        "fused_qkv": True,
        "naming": NEOX,
        "grouped_qkv": True,
        "gated": False,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": True,
        "parallel_residual": read.flag("use_parallel_residual", default=True),
    }


def stablelm(read: ConfigReader) -> dict[str, Any]:
    head_dim, parallel = divided_head_dim(read), read.flag("use_parallel_residual", default=False)
    kv_heads, head_norms = read.count("num_key_value_heads", 32), read.flag("qk_layernorm", default=False)
    norms = {"naming": _by_head(read.count("num_attention_heads"), kv_heads)} if head_norms else {}
    return (
        normed(read, kv_heads, head_dim)
        | norms
        | {
            "head_norms": head_norms,
            "own_head_norms": head_norms,
            "rope": read_rope(read, head_dim=head_dim, share=0.25),
            "activation": read_activation(read, "hidden_act", default="silu"),
            "qkv_bias": read.flag("use_qkv_bias", default=False),
            "parallel_residual": parallel,
            "shared_norm": parallel,
        }
    )


@functools.cache
def _by_head(heads: int, kv_heads: int) -> TensorLayout:
    """Return the layout of StableLM 2 12B, whose heads have a norm each."""
    norms = {
        f"self_attn.{kind}_layernorm.norms.{head}": f"self_attn.{kind}_norm.{head}"
        for kind, count in (("q", heads), ("k", kv_heads))
        for head in range(count)
    }
    return TensorLayout(inner=LLAMA_INNER | norms)


def phi(read: ConfigReader) -> dict[str, Any]:
    heads, head_dim = read.count("num_attention_heads"), read_head_dim(read)
    return normed(read, read.count("num_key_value_heads", heads, if_null=heads), head_dim) | {
        "rope": read_rope(read, head_dim=head_dim, share=0.5),
        "activation": read_activation(read, "hidden_act", default="gelu_new"),
        "head_norms": read.flag("qk_layernorm", default=False),
        "naming": PHI,
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "parallel_residual": True,
        "shared_norm": True,
    }


def normed(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the fields that these families share."""
    return head_sizes(read, kv_heads, head_dim) | {
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "longest": longest(read),
        "attention_scale": head_dim**-0.5,
        "tied": read.flag("tie_word_embeddings", default=False),
        "norm_eps": read.number("layer_norm_eps", 1e-5),
        "layer_norms": True,
        "norm_bias": True,
    }
