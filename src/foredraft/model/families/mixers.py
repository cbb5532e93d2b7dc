"""LFM 2, Granite 4 and Nemotron-H: hybrids whose recurrent layers are short convolutions or Mamba-2."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.hybrid import LINEAR, with_mixers
from foredraft.model.families.llama import granite
from foredraft.model.families.shared import FLAGS, FULL, GGUF, LAYER, WITH_BIASES, Family, Heads
from foredraft.model.recurrent_sizes import RecurrentSizes
from foredraft.model.rope import ROPE_KEYS, Rope, read_rope
from foredraft.model.tensor_names import EMBEDDING, LAST_NORM, LAYERS, LLAMA_INNER, Naming
from foredraft.model.unsupported import refusal

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader

CONV, MLP, EXPERTS = "conv", "mlp", "moe"  # kinds of layers, besides those that attend
PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}  # how Nemotron-H writes them
OLDER = {"mamba": LINEAR, "attention": FULL}  # spellings of files -> kinds
SPELLED = {"layer_types": "layers_block_type"}
NEMOTRON_KEYS = SPELLED | {
    "conv_kernel": "mamba_d_conv",
    "n_groups": "mamba_n_groups",
    "use_conv_bias": "mamba_conv_bias",
}
NO_ROTATION = Rope("default", 10_000.0, share=0.0)
UNLIMITED = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # time steps are not clamped


def kinds_of(read: ConfigReader, listed: Any, known: tuple[str, ...], key: str = "layer_types") -> list[str]:
    """Return the kind of every layer; a layer of experts is refused as what the model is."""
    kinds: list[Any] = [OLDER.get(str(kind), kind) for kind in listed] if isinstance(listed, list) else [None]
    if EXPERTS in kinds:
        raise refusal(read.config, ())
    if any(kind not in known for kind in kinds):
        raise read.error(key, f"it must be a list of {', '.join(known)}")
    if key == "layer_types" and len(kinds) != (layers := read.count("num_hidden_layers", len(kinds))):
        raise read.error(key, f"it must name the kind of each of the {layers} layers")
    return kinds


def lfm2(read: ConfigReader) -> dict[str, Any]:
    layers, hidden = read.count("num_hidden_layers"), read.count("hidden_size")
    attending, listed = read.take("full_attn_idxs"), read.take("layer_types")
    if listed is None:
        chosen = range(layers) if attending is None else attending
        listed = isinstance(chosen, list | range) and [
            (CONV, FULL)[layer in chosen] for layer in range(layers)
        ]
    kinds = kinds_of(read, listed, (FULL, CONV))
    read.choice("conv_bias", (False,), False)
    sizes = RecurrentSizes("convolution", 1, 1, 0, hidden, read.count("conv_L_cache", 3))
    inner = read.count("block_ff_dim", read.count("intermediate_size", 12_288))
    factor, multiple = read.number("block_ffn_dim_multiplier", 1.0), read.count("block_multiple_of", 256)
    if read.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(factor * int(2 * inner / 3))
        inner = multiple * ((inner + multiple - 1) // multiple)
    read.take("num_heads")  # older files have it beside num_attention_heads
    tied = read.flag("tie_embedding", read.flag("tie_word_embeddings", default=True))
    return {"intermediate_size": inner, "tied": tied} | with_mixers(read, kinds, sizes, "layer_types")


def lfm2_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a file; a layer without key heads convolves."""
    key, layers = "attention.head_count_kv", config["num_hidden_layers"]
    heads = read.take(key)
    if not isinstance(heads, list) or len(heads) != layers or len(found := {*heads} - {0}) != 1:
        raise read.error(key, f"it must hold a number or 0 for each of the {layers} layers")
    return {
        "num_key_value_heads": found.pop(),
        "layer_types": [FULL if each else CONV for each in heads],
        "conv_L_cache": read.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def mamba_sizes(read: ConfigReader, keys: tuple[str, ...], defaults: tuple[int, ...]) -> RecurrentSizes:
    """Return the sizes under the keys of groups, heads, states, the size of a head, and taps."""
    groups, heads, state, dim, taps = map(read.count, keys, defaults)
    if heads % groups:
        raise read.error(keys[1], f"it must be a multiple of {keys[0]}, {groups}")
    return RecurrentSizes("mamba", groups, heads, state, dim, taps)


def granite_hybrid(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of a Granite 4, with recurrent layers or without; one with experts is refused."""
    if read.count("num_local_experts", 8, if_null=0, allow_zero=True):
        raise refusal(read.config, ())
    for key in (*EXPERT_KEYS, "intermediate_size", "mamba_chunk_size"):
        read.take(key)  # of experts, and of how sums are cut
    layers, hidden = read.count("num_hidden_layers"), read.count("hidden_size")
    kinds = kinds_of(read, read.take("layer_types", [LINEAR] * layers), (FULL, LINEAR))
    width, heads = read.count("mamba_expand", 2) * hidden, read.count("mamba_n_heads", 128)
    dim = width // heads if read.take("mamba_d_head", "auto") == "auto" else read.count("mamba_d_head")
    if dim * heads != width:
        raise read.error("mamba_n_heads", f"heads must have {width} numbers together, by mamba_expand")
    keys = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")
    read.config = {**read.config, "mamba_d_head": dim}
    sizes = mamba_sizes(read, keys, (1, 128, 256, dim, 4))
    read.choice("mamba_conv_bias", (True,), True)
    read.choice("mamba_proj_bias", (False,), False)
    read.choice("hidden_act", ("silu",), "silu")
    if read.take("time_step_limit") not in UNLIMITED:
        raise read.error("time_step_limit", "only 0 to infinity is supported")
    fields = {"intermediate_size": read.count("shared_intermediate_size", 1024)}
    return fields | granite(read) | with_mixers(read, kinds, sizes, "layer_types")


def granite_rope(read: ConfigReader, head_dim: int) -> Rope:
    if read.take("position_embedding_type") == "rope":
        return read_rope(read)
    return unrotated(read, head_dim)


def unrotated(read: ConfigReader, head_dim: int) -> Rope:
    read.ignored |= {
        key: value for key in (*ROPE_KEYS, "rope_theta") if (value := read.take(key)) is not None
    }
    return NO_ROTATION


def nemotron_h(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of a Nemotron-H; a layer is a mixer, with the MLP that follows it, if any."""
    pattern, listed = read.take("hybrid_override_pattern"), read.take("layer_types")
    key = "hybrid_override_pattern" if listed is None else "layers_block_type"
    if listed is None and isinstance(pattern, str):
        listed = [PATTERN.get(each) for each in pattern]
    blocks = kinds_of(read, listed, (FULL, LINEAR, MLP), key)
    if any(pair == (MLP, MLP) for pair in pairwise([MLP, *blocks])):
        raise read.error(key, "an MLP must follow a layer that mixes positions")
    mixers = [block for block, kind in enumerate(blocks) if kind != MLP]
    for unused in (*EXPERT_KEYS, *UNUSED):
        read.take(unused)
    read.choice("use_bias", (False,), False)
    read.choice("use_conv_bias", (True,), True)
    read.choice("mamba_hidden_act", ("silu",), "silu")
    read.choice("residual_in_fp32", (False,), False)
    keys = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel")
    sizes = mamba_sizes(read, keys, (8, 128, 128, 64, 4))
    bare = tuple(layer for layer, block in enumerate(mixers) if MLP not in blocks[block + 1 : block + 2])
    return {
        "layers": len(mixers),
        "intermediate_size": read.count("intermediate_size", 21_504),
        "without_mlp": bare,
        "naming": _by_block(tuple(blocks)),
    } | with_mixers(read, [blocks[block] for block in mixers], sizes, key)


@functools.cache
def _by_block(blocks: tuple[str, ...]) -> Naming:
    """Return the names of blocks of one mixer each."""
    outer, layer = {"embeddings": EMBEDDING, "norm_f": LAST_NORM}, -1
    for block, kind in enumerate(blocks):
        layer += kind != MLP
        own, stored = f"{LAYERS}.{layer}", f"layers.{block}"
        outer[f"{stored}.norm"] = f"{own}.{'post_attention' if kind == MLP else 'input'}_layernorm"
        for name, decoders in MIXERS[kind].items():
            outer[f"{stored}.{name}"] = f"{own}.{decoders}"
    return Naming(prefixes=("backbone.", "model."), outer=outer, inner={})


MIXERS = {  # kind of a block -> names of its modules -> the decoder's
    LINEAR: {f"mixer{part}": f"mamba{part}" for part in ("", ".in_proj", ".conv1d", ".norm", ".out_proj")},
    FULL: {f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    MLP: {f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")},
}
EXPERT_KEYS = """
    num_experts_per_tok output_router_logits router_aux_loss_coef n_routed_experts n_shared_experts
    moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size moe_shared_expert_overlap
    routed_scaling_factor n_group topk_group norm_topk_prob
    """.split()
# what else says nothing of the model: how states are made, kept and summed, and predictions of further tokens
UNUSED = """
    num_hidden_layers num_logits_to_keep use_mamba_kernels expand time_step_min time_step_max time_step_limit
    time_step_floor mamba_expand mamba_dt_min mamba_dt_max mamba_dt_limit mamba_dt_init_floor num_heads
    num_local_experts chunk_size mamba_chunk_size mamba_proj_bias mamba_ssm_cache_dtype mtp_layers_block_type
    mtp_hybrid_override_pattern rescale_prenorm_residual attention_bias sliding_window
    """.split()
IN_FILE = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
LFM2 = Naming(
    outer={"embed_tokens": EMBEDDING, "embedding_norm": LAST_NORM},
    inner={
        **LLAMA_INNER,
        "operator_norm": "input_layernorm",
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
)
GRANITE = Naming(
    inner={
        **LLAMA_INNER,
        "shared_mlp.input_linear": "mlp.gate_up_proj",
        "shared_mlp.output_linear": "mlp.down_proj",
    }
)
FAMILIES: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid", granite_hybrid, eos=2, bos=1, positions=2048, windows=None, rope=granite_rope,
        flags=WITH_BIASES, spelled=SPELLED, inner_key="shared_intermediate_size",
        fixed={"naming": GRANITE, "fused_gate_up": True},
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2", lfm2, eos=2, bos=1, positions=128_000, heads=Heads(8), windows=None,
        norm_eps=("norm_eps", 1e-5), rope=lambda read, head_dim: read_rope(read, 1_000_000.0),
        fixed={"naming": LFM2, "head_norms": True},
        gguf=(
            GGUF(
                "lfm2", lfm2_in_gguf, norm_key="norm_eps", windows=False,
                by_layer=("attention.head_count_kv",), parts=LAYER | IN_FILE,
                outer={"token_embd_norm": LAST_NORM},
            ),
        ),
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", nemotron_h, eos=2, bos=1, positions=4096, heads=Heads(8, dim=128, null_dim=False),
        windows=None, rope=unrotated, activation=("mlp_hidden_act", "relu2"),
        flags=FLAGS | {"mlp_bias": False}, norm_eps=("layer_norm_epsilon", 1e-5), spelled=NEMOTRON_KEYS,
        fixed={"gated": False, "norm_float32": True},
    ),
}  # fmt: skip
