"""GPT-2 and OPT: layer norms, learned positions and an MLP without a gate."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import longest
from foredraft.model.families.shared import (
    FULL,
    divided_head_dim,
    head_sizes,
    own_heads,
    read_activation,
    read_windows,
)
from foredraft.model.projected_embeddings import PROJECTIONS, ProjectedLayout
from foredraft.model.rope import Rope
from foredraft.model.tensor_layouts import EMBEDDING, LAST_NORM, POSITIONS, TensorLayout

GPT2 = TensorLayout(
    prefixes=("transformer.", ""),
    layers="h",
    outer={"wte": EMBEDDING, "wpe": POSITIONS, "ln_f": LAST_NORM},
    inner={
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attn.qkv_proj",
        "attn.c_proj": "self_attn.o_proj",
        "ln_2": "post_attention_layernorm",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
    transposed=frozenset({"self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"}),
    ignored=("attn.bias", "attn.masked_bias"),
)
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
OPT = TensorLayout(
    prefixes=("model.decoder.", "decoder."),
    outer={"embed_tokens": EMBEDDING, "embed_positions": POSITIONS, "final_layer_norm": LAST_NORM},
    inner={
        "self_attn_layer_norm": "input_layernorm",
        "self_attn.q_proj": "self_attn.q_proj",
        "self_attn.k_proj": "self_attn.k_proj",
        "self_attn.v_proj": "self_attn.v_proj",
        "self_attn.out_proj": "self_attn.o_proj",
        "final_layer_norm": "post_attention_layernorm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    },
)
OPT_OFFSET = 2  # the row of position 0 in OPT's table
NO_ROTATION = Rope("default", 10_000.0, share=0.0)


def gpt2(read: ConfigReader) -> dict[str, Any]:
    inner = 4 * read.count("hidden_size")
    read.choice("add_cross_attention", (False,), False)
    read.choice("scale_attn_by_inverse_layer_idx", (False,), False)
    scaled = read.flag("scale_attn_weights", default=True)
    fields = learned(read) | {
        "learned_positions": read.count("max_position_embeddings"),
        "activation": read_activation(read, "activation_function", default="gelu_new"),
        "intermediate_size": read.count("n_inner", inner, if_null=inner),
        "naming": GPT2,
        "norm_eps": read.number("layer_norm_epsilon", 1e-5),
        "fused_qkv": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
    return fields if scaled else fields | {"attention_scale": 1.0}


def opt(read: ConfigReader) -> dict[str, Any]:
    biases, before = read.flag("enable_bias", default=True), read.flag("do_layer_norm_before", default=True)
    read.choice("_remove_final_layer_norm", (False,), False)
    read.choice("layer_norm_elementwise_affine", (True,), True)
    fields = learned(read)
    naming = OPT if before else _sums_normed(read.count("num_hidden_layers"))
    if read.take("word_embed_proj_dim") not in (None, read.count("hidden_size")):  # OPT 350M
        read.count("word_embed_proj_dim")
        naming, fields["tied"] = _projected(naming, fields["tied"]), False
    return fields | {
        "pre_norms": before,
        "sum_norms": not before,
        "learned_positions": read.count("max_position_embeddings") + OPT_OFFSET,
        "position_offset": OPT_OFFSET,
        "activation": read_activation(read, "activation_function", default="relu"),
        "intermediate_size": read.count("ffn_dim", 3072),
        "naming": naming,
        "norm_eps": 1e-5,
        "qkv_bias": biases,
        "output_bias": biases,
        "mlp_bias": biases,
    }


@functools.cache
def _projected(layout: TensorLayout, tied: bool) -> ProjectedLayout:
    """Return a layout whose embedding and head are projected."""
    outer = {**layout.outer, **PROJECTIONS}
    return ProjectedLayout(prefixes=layout.prefixes, outer=outer, inner=layout.inner, tied=tied)


@functools.cache
def _sums_normed(layers: int) -> TensorLayout:
    """Return the layout of OPT with norms after sums: the final norm is that of the last layer's last sum."""
    last = {f"layers.{layers - 1}.final_layer_norm": LAST_NORM}
    outer = {name: own for name, own in OPT.outer.items() if own != LAST_NORM} | last
    norms = {
        "self_attn_layer_norm": "post_attention_layernorm",
        "final_layer_norm": "post_feedforward_layernorm",
    }
    return replace(OPT, outer=outer, inner=OPT.inner | norms)


def learned(read: ConfigReader) -> dict[str, Any]:
    """Return the fields that GPT-2 and OPT share."""
    head_dim = divided_head_dim(read)
    return head_sizes(read, own_heads(read), head_dim) | {
        "rope": NO_ROTATION,
        "windows": read_windows(read, {FULL: None}, [FULL]),
        "longest": longest(read),
        "attention_scale": head_dim**-0.5,
        "tied": read.flag("tie_word_embeddings", default=True),
        "layer_norms": True,
        "norm_bias": True,
        "gated": False,
    }
