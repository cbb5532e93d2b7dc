"""GPT-2, OPT, GPT-NeoX, StableLM, Phi, StarCoder 2: layer norms, learned positions, heads rotated partly."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import (
    FLAGS,
    FUSED_QKV,
    GGUF,
    Family,
    Heads,
    longest,
    window_of_all,
    with_longest,
)
from foredraft.model.layers import PROJECTIONS, ProjectedLayout
from foredraft.model.rope import Rope, read_rope
from foredraft.model.tensor_names import EMBEDDING, LAST_NORM, LLAMA_INNER, POSITIONS, Naming

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader

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
PARALLEL = "use_parallel_residual"
OPT_OFFSET = 2  # the row of position 0 in OPT's table
NO_ROTATION = Rope("default", 10_000.0, share=0.0)


def gpt2(read: ConfigReader) -> dict[str, Any]:
    inner = 4 * read.count("hidden_size")
    read.choice("add_cross_attention", (False,), False)
    read.choice("scale_attn_by_inverse_layer_idx", (False,), False)
    scaled = read.flag("scale_attn_weights", default=True)
    fields = {
        "longest": longest(read),
        "learned_positions": read.count("max_position_embeddings"),
        "intermediate_size": read.count("n_inner", inner, if_null=inner),
    }
    return fields if scaled else fields | {"attention_scale": 1.0}


def opt(read: ConfigReader) -> dict[str, Any]:
    biases, before = read.flag("enable_bias", default=True), read.flag("do_layer_norm_before", default=True)
    read.choice("_remove_final_layer_norm", (False,), False)
    read.choice("layer_norm_elementwise_affine", (True,), True)
    fields: dict[str, Any] = {"longest": longest(read)}
    naming = OPT if before else _sums_normed(read.count("num_hidden_layers"))
    if read.take("word_embed_proj_dim") not in (None, read.count("hidden_size")):  # OPT 350M
        read.count("word_embed_proj_dim")
        naming = _projected(naming, read.flag("tie_word_embeddings", default=True))
        fields["tied"] = False
    return fields | {
        "pre_norms": before,
        "sum_norms": not before,
        "learned_positions": read.count("max_position_embeddings") + OPT_OFFSET,
        "intermediate_size": read.count("ffn_dim", 3072),
        "naming": naming,
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


def stablelm(read: ConfigReader) -> dict[str, Any]:
    parallel = read.flag(PARALLEL, default=False)
    head_norms = read.flag("qk_layernorm", default=False)
    heads = read.count("num_attention_heads"), read.count("num_key_value_heads", 32)
    return ({"naming": _by_head(*heads)} if head_norms else {}) | {
        "longest": longest(read),
        "head_norms": head_norms,
        "own_head_norms": head_norms,
        "qkv_bias": read.flag("use_qkv_bias", default=False),
        "parallel_residual": parallel,
        "shared_norm": parallel,
    }


@functools.cache
def _by_head(heads: int, kv_heads: int) -> Naming:
    """Return the layout of StableLM 2 12B, whose heads have a norm each."""
    norms = {
        f"self_attn.{kind}_layernorm.norms.{head}": f"self_attn.{kind}_norm.{head}"
        for kind, count in (("q", heads), ("k", kv_heads))
        for head in range(count)
    }
    return Naming(inner=LLAMA_INNER | norms)


STARCODER2 = Naming(inner={**LLAMA_INNER, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"})


def stablelm_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    # a model of parallel residuals has one norm for attention and MLP
    parallel = not read.has_tensor("blk.0.ffn_norm.weight")
    read.flag(PARALLEL, default=parallel)  # older files have true in all models
    head_norms = read.has_tensor("blk.0.attn_q_norm.weight")
    return {"qk_layernorm": head_norms, PARALLEL: parallel}


LAYER_EPS = ("layer_norm_eps", 1e-5)
NORMED = {"layer_norms": True, "norm_bias": True}
BIASED = dict.fromkeys(BIASES, True)
TIED = FLAGS | {"tied": True}
LEARNED: dict[str, Any] = {  # positions are learned
    "heads": Heads(divided=True, equal=True), "rope": lambda *_: NO_ROTATION, "flags": TIED,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        "gpt2", gpt2, eos=50256, bos=50256, positions=1024, activation=("activation_function", "gelu_new"),
        norm_eps=("layer_norm_epsilon", 1e-5), spelled=GPT2_KEYS, inner_key="n_inner", **LEARNED,
        fixed={**NORMED, **BIASED, "gated": False, "fused_qkv": True, "naming": GPT2},
        gguf=(
            GGUF(
                "gpt2",
                lambda read, config: {"intermediate_size": None, "n_inner": config["intermediate_size"]},
                activation="gelu_new", activation_key="activation_function", norm_key="layer_norm_epsilon",
                rope="own", parts=FUSED_QKV,
            ),
        ),
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        lambda read: with_longest(read) | {"parallel_residual": read.flag(PARALLEL, default=True)},
        eos=2, bos=0, positions=2048, heads=LEARNED["heads"], activation=("hidden_act", "gelu"),
        rope=lambda read, head_dim: read_rope(
            read, head_dim=head_dim, share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct"
        ),
        flags=FLAGS | {"attention_bias": True}, norm_eps=LAYER_EPS,
        fixed={
            **NORMED, "mlp_bias": True, "fused_qkv": True, "grouped_qkv": True, "naming": NEOX, "gated": False
        },
        gguf=(
            GGUF(
                "gptneox", lambda read, config: {PARALLEL: read.flag(PARALLEL, default=True)},
                activation="gelu", biases={"attention_bias": "attn_qkv"}, norm_key="layer_norm_eps",
                rope="part", parts=FUSED_QKV,
            ),
        ),
    ),
    "OPTForCausalLM": Family(
        "opt", opt, eos=2, bos=2, positions=2048, activation=("activation_function", "relu"), norm_eps=1e-5,
        inner_key="ffn_dim", fixed={**NORMED, "gated": False, "position_offset": OPT_OFFSET}, **LEARNED,
    ),
    "PhiForCausalLM": Family(
        "phi",
        lambda read: with_longest(read) | {"head_norms": read.flag("qk_layernorm", default=False)},
        eos=2, bos=1, positions=2048, activation=("hidden_act", "gelu_new"), norm_eps=LAYER_EPS,
        rope=lambda read, head_dim: read_rope(read, head_dim=head_dim, share=0.5),
        fixed={
            **NORMED, **BIASED, "naming": PHI, "gated": False, "head_bias": True, "parallel_residual": True,
            "shared_norm": True,
        },
        gguf=(
            GGUF(
                "phi2", fixed={"qk_layernorm": False}, activation="gelu_new", norm_key="layer_norm_eps",
                rope="part",
            ),
        ),
    ),
    "StableLmForCausalLM": Family(
        "stablelm", stablelm, eos=0, bos=0, positions=4096, heads=Heads(32, null_kv=False, divided=True),
        rope=lambda read, head_dim: read_rope(read, head_dim=head_dim, share=0.25), norm_eps=LAYER_EPS,
        fixed=NORMED,
        gguf=(
            GGUF(
                "stablelm", stablelm_in_gguf, biases={"use_qkv_bias": "attn_q"}, norm_key="layer_norm_eps",
                rope="part",
            ),
        ),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2", lambda read: dict.fromkeys(BIASES, read.flag("use_bias", default=True)),
        eos=50256, bos=50256, positions=4096, heads=Heads(2, null_kv=False), windows=window_of_all,
        activation=("hidden_act", "gelu_pytorch_tanh"), flags=TIED, norm_eps=("norm_epsilon", 1e-5),
        fixed={**NORMED, "naming": STARCODER2, "gated": False},
        gguf=(
            GGUF(  # llama.cpp does not know its window
                "starcoder2", fixed={"sliding_window": None}, activation="gelu_pytorch_tanh",
                biases={"use_bias": "attn_q"}, norm_key="norm_epsilon",
            ),
        ),
    ),
}  # fmt: skip
