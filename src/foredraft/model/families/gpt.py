"""GPT-2, OPT, GPT-NeoX, StableLM, Phi, StarCoder 2: layer norms, learned positions, heads rotated partly."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.llama import longest
from foredraft.model.families.shared import (
    FUSED_QKV,
    GGUF,
    Family,
    divided_head_dim,
    equal_windows,
    head_sizes,
    own_heads,
    read_activation,
    read_biases,
    read_head_dim,
    read_kv_heads,
    read_window,
)
from foredraft.model.layers import PROJECTIONS, ProjectedLayout
from foredraft.model.rope import Rope
from foredraft.model.rope_config import read_rope
from foredraft.model.tensor_names import EMBEDDING, LAST_NORM, LLAMA_INNER, POSITIONS, Naming

if TYPE_CHECKING:
    from foredraft.model.gguf.gguf_config import MetadataReader

GPT2 = Naming(
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
OPT = Naming(
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
BIASES = ("qkv_bias", "output_bias", "mlp_bias")
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
        **dict.fromkeys(BIASES, True),
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
        **dict.fromkeys(BIASES, biases),
    }


@functools.cache
def _projected(layout: Naming, tied: bool) -> ProjectedLayout:
    outer = {**layout.outer, **PROJECTIONS}
    return ProjectedLayout(prefixes=layout.prefixes, outer=outer, inner=layout.inner, tied=tied)


@functools.cache
def _sums_normed(layers: int) -> Naming:
    """Return the layout of OPT with norms after sums: the final norm is that of the last layer's last sum."""
    last = {f"layers.{layers - 1}.final_layer_norm": LAST_NORM}
    outer = {name: own for name, own in OPT.outer.items() if own != LAST_NORM} | last
    norms = {
        "self_attn_layer_norm": "post_attention_layernorm",
        "final_layer_norm": "post_feedforward_layernorm",
    }
    return replace(OPT, outer=outer, inner=OPT.inner | norms)


def learned(read: ConfigReader) -> dict[str, Any]:
    head_dim = divided_head_dim(read)
    return head_sizes(read, own_heads(read), head_dim) | {
        "rope": NO_ROTATION,
        "windows": equal_windows(read, None),
        "longest": longest(read),
        "attention_scale": head_dim**-0.5,
        "tied": read.flag("tie_word_embeddings", default=True),
        "layer_norms": True,
        "norm_bias": True,
        "gated": False,
    }


NEOX = Naming(
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
PHI = Naming(
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
    head_dim = divided_head_dim(read)
    rope = read_rope(read, head_dim=head_dim, share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct")
    return normed(read, own_heads(read), head_dim) | {
        "rope": rope,
        "activation": read_activation(read, "hidden_act", default="gelu"),
        "fused_qkv": True,
        "naming": NEOX,
        "grouped_qkv": True,
        "gated": False,
        **read_biases(read, default=True),
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
def _by_head(heads: int, kv_heads: int) -> Naming:
    """Return the layout of StableLM 2 12B, whose heads have a norm each."""
    norms = {
        f"self_attn.{kind}_layernorm.norms.{head}": f"self_attn.{kind}_norm.{head}"
        for kind, count in (("q", heads), ("k", kv_heads))
        for head in range(count)
    }
    return Naming(inner=LLAMA_INNER | norms)


def phi(read: ConfigReader) -> dict[str, Any]:
    head_dim = read_head_dim(read)
    return normed(read, read_kv_heads(read), head_dim) | {
        "rope": read_rope(read, head_dim=head_dim, share=0.5),
        "activation": read_activation(read, "hidden_act", default="gelu_new"),
        "head_norms": read.flag("qk_layernorm", default=False),
        "naming": PHI,
        "gated": False,
        **dict.fromkeys(BIASES, True),
        "head_bias": True,
        "parallel_residual": True,
        "shared_norm": True,
    }


def normed(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return head_sizes(read, kv_heads, head_dim) | {
        "windows": equal_windows(read, None),
        "longest": longest(read),
        "attention_scale": head_dim**-0.5,
        "tied": read.flag("tie_word_embeddings", default=False),
        "norm_eps": read.number("layer_norm_eps", 1e-5),
        "layer_norms": True,
        "norm_bias": True,
    }


STARCODER2 = Naming(inner={**LLAMA_INNER, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})


def starcoder2(read: ConfigReader) -> dict[str, Any]:
    head_dim, biases = read_head_dim(read), read.flag("use_bias", default=True)
    return head_sizes(read, read.count("num_key_value_heads", 2), head_dim) | {
        "rope": read_rope(read),
        "windows": equal_windows(read, read_window(read, None)),
        "attention_scale": head_dim**-0.5,
        "activation": read_activation(read, "hidden_act", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "norm_eps": read.number("norm_epsilon", 1e-5),
        "layer_norms": True,
        "norm_bias": True,
        "gated": False,
        "naming": STARCODER2,
        **dict.fromkeys(BIASES, biases),
    }


def gpt2_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": None, "n_inner": config["intermediate_size"]}


def gpt_neox_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": read.flag("use_parallel_residual", default=True)}


def stablelm_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    # a model of parallel residuals has one norm for attention and MLP
    parallel = not read.has_tensor("blk.0.ffn_norm.weight")
    read.flag("use_parallel_residual", default=parallel)  # older files have true in all models
    head_norms = read.has_tensor("blk.0.attn_q_norm.weight")
    return {"qk_layernorm": head_norms, "use_parallel_residual": parallel}


FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        "gpt2", gpt2, eos=50256, bos=50256, positions=1024, spelled=GPT2_KEYS, inner_key="n_inner",
        gguf=(
            GGUF(
                "gpt2", gpt2_in_gguf, activation="gelu_new", activation_key="activation_function",
                norm_key="layer_norm_epsilon", rope="own", parts=FUSED_QKV,
            ),
        ),
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", gpt_neox, eos=2, bos=0, positions=2048,
        gguf=(
            GGUF(
                "gptneox", gpt_neox_in_gguf, activation="gelu", biases={"attention_bias": "attn_qkv"},
                norm_key="layer_norm_eps", rope="part", parts=FUSED_QKV,
            ),
        ),
    ),
    "OPTForCausalLM": Family("opt", opt, eos=2, bos=2, positions=2048, inner_key="ffn_dim"),
    "PhiForCausalLM": Family(
        "phi", phi, eos=2, bos=1, positions=2048,
        gguf=(
            GGUF(
                "phi2", fixed={"qk_layernorm": False}, activation="gelu_new", norm_key="layer_norm_eps",
                rope="part",
            ),
        ),
    ),
    "StableLmForCausalLM": Family(
        "stablelm", stablelm, eos=0, bos=0, positions=4096,
        gguf=(
            GGUF(
                "stablelm", stablelm_in_gguf, biases={"use_qkv_bias": "attn_q"}, norm_key="layer_norm_eps",
                rope="part",
            ),
        ),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2", starcoder2, eos=50256, bos=50256, positions=4096,
        gguf=(
            GGUF(  # llama.cpp does not know its window
                "starcoder2", fixed={"sliding_window": None}, activation="gelu_pytorch_tanh",
                biases={"use_bias": "attn_q"}, norm_key="norm_epsilon",
            ),
        ),
    ),
}  # fmt: skip
