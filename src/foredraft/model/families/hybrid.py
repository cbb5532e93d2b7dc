"""Hybrids, whose layers are gated delta nets but for every fourth, which attends: Qwen 3.5 to 3.8 and Next.

Of Qwen3-Next, models without experts run, which the released ones are not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import FULL, GGUF, LAYER, WITH_BIASES, Family, Heads, read_windows
from foredraft.model.recurrent_sizes import RecurrentSizes
from foredraft.model.rope import ROPE_KEYS, Rope, read_rope
from foredraft.model.unsupported import refusal

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader

LINEAR = "linear_attention"
MULTIMODAL = ("mrope_section", "mrope_interleaved")  # rotary parameters of images
# keys of the config that say what the family always does
SAID: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "hidden_act": ("silu", "swish"),  # of convolutions, too
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("silu",),
}


def delta_sizes(read: ConfigReader) -> RecurrentSizes:
    """Return the sizes of recurrent layers; heads of values are a multiple of those of keys."""
    keys, values = read.count("linear_num_key_heads", 16), read.count("linear_num_value_heads", 32)
    if values % keys:
        raise read.error("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads, {keys}")
    return RecurrentSizes(
        "delta",
        keys,
        values,
        read.count("linear_key_head_dim", 128),
        read.count("linear_value_head_dim", 128),
        read.count("linear_conv_kernel_dim", 4),
    )


def text_rope(read: ConfigReader, head_dim: int) -> Rope:
    """Return the rotary parameters; of a text, the three positions of a token are equal."""
    given = {key: value for key, value in read.config.items() if key in ROPE_KEYS and isinstance(value, dict)}
    plain = {key: {n: v for n, v in own.items() if n not in MULTIMODAL} for key, own in given.items()}
    read.config = {**read.config, **plain}
    return read_rope(read, head_dim=head_dim, share=0.25)


def with_mixers(read: ConfigReader, kinds: list[str], sizes: RecurrentSizes, key: str) -> dict[str, Any]:
    recurrent = tuple(layer for layer, kind in enumerate(kinds) if kind != FULL)
    if FULL not in kinds:
        raise read.error(key, "a model without any layer that attends is not supported")
    found = {"recurrent_layers": recurrent, "recurrent": sizes if recurrent else None}
    return found | {"windows": (None,) * len(kinds)}


def qwen3_5(read: ConfigReader) -> dict[str, Any]:
    layers, interval = read.count("num_hidden_layers"), read.count("full_attention_interval", 4)
    kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    listed = read.take("layer_types")
    read_windows(read, {FULL: None, LINEAR: None}, kinds)  # refuses a list of others
    for key, neutral in SAID.items():
        if read.take(key) not in (None, *neutral):
            raise read.error(key, f"only {neutral[0]} is supported")
    return with_mixers(read, kinds if listed is None else listed, delta_sizes(read), "layer_types")


EXPERTS = """
    moe_intermediate_size norm_topk_prob num_experts_per_tok router_aux_loss_coef
    shared_expert_intermediate_size
    """.split()  # keys that say nothing of layers without experts


def qwen3_next(read: ConfigReader) -> dict[str, Any]:
    experts = read.count("num_experts", 512, if_null=0, allow_zero=True)
    step = read.count("decoder_sparse_step", 1)
    if not isinstance(dense := read.take("mlp_only_layers") or [], list):
        raise read.error("mlp_only_layers", "it must be a list of layers")
    layers = (layer for layer in range(read.count("num_hidden_layers")) if layer not in dense)
    if experts and any((layer + 1) % step == 0 for layer in layers):
        raise refusal(read.config, ())
    for key in EXPERTS:
        read.take(key)
    fields = qwen3_5(read)
    sizes = fields["recurrent"]
    return fields | {"recurrent": None if sizes is None else replace(sizes, by_key=True)}


def qwen35_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of recurrent layers; the last layers of a file may predict further tokens."""
    further = read.count("nextn_predict_layers", 0, allow_zero=True)
    layers, rotated = config["num_hidden_layers"] - further, read.count("rope.dimension_count")
    if layers < 1:
        raise read.error("nextn_predict_layers", f"block_count, {layers + further}, must be more")
    interval, listed = read.count("full_attention_interval", 4), read.take("attention.recurrent_layers")
    recurs = [bool((layer + 1) % interval) for layer in range(layers)]
    if isinstance(listed, list) and len(listed) == layers + further:
        recurs = listed[:layers]
    elif listed is not None:
        raise read.error("attention.recurrent_layers", f"it must say it of {layers + further} layers")
    sections, pairs = read.take("rope.dimension_sections", [rotated] * 3), rotated // 2
    if not isinstance(sections, list) or len(sections) < 3 or not all(type(n) is int for n in sections):
        raise read.error("rope.dimension_sections", "it must be three whole numbers")
    # of a text, every pair of channels that one of three positions turns is turned alike
    if sum(min(count, (pairs + 2 - at) // 3) for at, count in enumerate(sections[:3])) != pairs:
        raise read.error("rope.dimension_sections", f"it must cover {pairs} pairs of channels")
    values, inner = read.count("ssm.time_step_rank"), read.count("ssm.inner_size")
    if inner % values:
        raise read.error("ssm.inner_size", f"it must be a multiple of ssm.time_step_rank, {values}")
    return {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": further,
        "layer_types": [LINEAR if each else FULL for each in recurs],
        "linear_num_key_heads": read.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": read.count("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": read.count("ssm.conv_kernel"),
    }


QWEN35 = {part: name for part, name in LAYER.items() if part != "ffn_norm"} | {
    "post_attention_norm": LAYER["ffn_norm"],
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MTP = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.shared_head_head": "lm_head",
    "nextn.embed_tokens": "embed_tokens",
}
QWEN: dict[str, Any] = {
    "eos": None, "bos": None, "positions": 32_768, "windows": None, "flags": WITH_BIASES, "rope": text_rope,
    "fixed": {"head_norms": True, "norm_offset": True, "gated_attention": True},
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", qwen3_next, heads=Heads(2, null_kv=False, dim=256, null_dim=False), **QWEN
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", qwen3_5, heads=Heads(4, null_kv=False, dim=256, null_dim=False), **QWEN,
        gguf=(
            GGUF(
                "qwen35", qwen35_in_gguf, rope="part", windows=False, parts=QWEN35, further=MTP,
                adds_one=True,
            ),
        ),
    ),
}  # fmt: skip
