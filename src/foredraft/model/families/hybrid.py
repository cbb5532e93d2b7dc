"""Hybrids: Qwen 3.5 to 3.8, whose layers are gated delta nets but for every fourth, which attends."""

from __future__ import annotations

from typing import Any

from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import FULL, WITH_BIASES, Family, Heads, read_windows
from foredraft.model.recurrent_sizes import RecurrentSizes
from foredraft.model.rope import ROPE_KEYS, Rope, read_rope

LINEAR = "linear_attention"
MULTIMODAL = ("mrope_section", "mrope_interleaved")  # rotary parameters of images
# keys of the config that say what the family always does, in its files and not in the reference's class
SAID: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
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


def qwen3_5(read: ConfigReader) -> dict[str, Any]:
    layers, interval = read.count("num_hidden_layers"), read.count("full_attention_interval", 4)
    kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    listed = read.take("layer_types")
    windows = read_windows(read, {FULL: None, LINEAR: None}, kinds)
    kinds = kinds if listed is None else listed
    if FULL not in kinds:
        raise read.error("layer_types", "a model without any layer that attends is not supported")
    for key, neutral in SAID.items():
        if read.take(key) not in (None, *neutral):
            raise read.error(key, f"only {neutral[0]} is supported")
    recurrent, sizes = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR), delta_sizes(read)
    return {"windows": windows, "recurrent_layers": recurrent, "recurrent": sizes if recurrent else None}


FAMILIES: dict[str, Family] = {
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", qwen3_5, eos=None, bos=None, positions=32_768,
        heads=Heads(4, null_kv=False, dim=256, null_dim=False), windows=None, flags=WITH_BIASES,
        rope=text_rope,
        fixed={
            "head_norms": True, "norm_offset": True, "gated_attention": True,
        },
    ),
}  # fmt: skip
