"""Llama, Mistral, Qwen, Phi 3, Granite, Seed-OSS, SmolLM 3, InternLM 2, OLMo, EXAONE 4, GLM-4 and Cohere 2.

`transformers` has no class of InternLM 2: its reference is the modelling code that its checkpoints bring
(https://huggingface.co/internlm/internlm2_5-7b/blob/main/modeling_internlm2.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foredraft.model.config import SHARED_KEYS, ConfigReader
from foredraft.model.families.shared import (
    ATTENTION_BIAS,
    BIASES,
    FLAGS,
    FULL,
    FUSED_QKV,
    GGUF,
    LAYER,
    NORMED_AFTER,
    NORMED_TWICE,
    SLIDING,
    WITH_BIASES,
    Family,
    Heads,
    equal_windows,
    full_layers,
    read_window,
    read_windows,
    window_of_all,
    with_longest,
)
from foredraft.model.rope import ROPE_KEYS, read_growing_rope, read_rope, read_ropes
from foredraft.model.tensor_names import EMBEDDING, LAST_NORM, LLAMA_INNER, Naming

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader

ORIGINAL, ORIGINAL_KEY = "original_max_position_embeddings", "rope.scaling.original_context_length"


def mistral_windows(read: ConfigReader) -> tuple[int | None, ...]:
    window = read_window(read)
    kind = FULL if window is None else SLIDING
    return read_windows(read, {FULL: None, kind: window}, [kind])


def ministral3(read: ConfigReader) -> dict[str, Any]:
    if all(read.take(key) is None for key in ROPE_KEYS):
        read.config = {**read.config, ROPE_KEYS[0]: ROPE}
    rope, query_rope = read_growing_rope(read)
    return {"rope": rope, "query_rope": query_rope}


def granite(read: ConfigReader) -> dict[str, Any]:
    factors = {
        "embedding_scale": read.number("embedding_multiplier", 1.0),
        "residual_scale": read.number("residual_multiplier", 1.0),
        "logit_scale": 1 / read.number("logits_scaling", 1.0),  # logits are divided by it
    }
    scales = {name: None if factor == 1 else factor for name, factor in factors.items()}
    return {"attention_scale": read.number("attention_multiplier", 1.0), **scales}


def seed_oss(read: ConfigReader) -> dict[str, Any]:
    return {
        "qkv_bias": read.flag("attention_bias", default=True),
        "output_bias": read.flag("attention_out_bias", if_null=False),
    }


def smollm3(read: ConfigReader) -> dict[str, Any]:
    unrotated, window, layers = read_unrotated(read), read_window(read, None), read.count("num_hidden_layers")
    used = read.flag("use_sliding_window") and window is not None
    kinds = [SLIDING if used and layer in unrotated else FULL for layer in range(layers)]
    known: dict[str, int | None] = {FULL: None} if window is None else {FULL: None, SLIDING: window}
    return {"unrotated": unrotated, "windows": read_windows(read, known, kinds)}


def internlm2(read: ConfigReader) -> dict[str, Any]:
    bias, code = read.flag("bias", default=True), read.take("auto_map")
    named = code.get("AutoModelForCausalLM", CODE) if isinstance(code, dict) else code
    if named is not None and str(named).rpartition("--")[2] != CODE:
        raise read.error("auto_map", f"only the code {CODE} is known")
    return {"qkv_bias": bias, "output_bias": bias}


def olmo3(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    theta = 500_000.0  # the default rotary base of all layers
    rope, window_rope = read_ropes(read, theta, theta, window_key=None)
    kinds = [*[SLIDING] * 3, FULL]
    windows = read_windows(read, {SLIDING: window, FULL: None}, kinds)
    return {"rope": rope, "window_rope": window_rope, "windows": windows}


def exaone4(read: ConfigReader) -> dict[str, Any]:
    window = read_window(read)
    # beside a list of the layers, the pattern says nothing, and may be a text as in "LLLG"
    pattern = read.take("sliding_window_pattern", 4)
    if window is None:
        return {"windows": equal_windows(read, None)}
    if read.take("layer_types") is None:
        pattern = read.count("sliding_window_pattern", 4)
    kinds = [*[SLIDING] * (pattern - 1), FULL] if isinstance(pattern, int) else [FULL]
    windows = read_windows(read, {SLIDING: window, FULL: None}, kinds)
    return {"windows": windows, "unrotated": full_layers(windows)}


def cohere2(read: ConfigReader) -> dict[str, Any]:
    window, pattern = read.count("sliding_window", 4096), read.count("sliding_window_pattern", 4)
    windows = read_windows(read, {SLIDING: window, FULL: None}, [*[SLIDING] * (pattern - 1), FULL])
    return {
        "windows": windows,
        "unrotated": full_layers(windows),
        "logit_scale": read.number("logit_scale", 0.0625),
    }


ROPE = {  # the rotary parameters of a checkpoint that has none
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Qwen's windows: enabled by `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = read_window(read), read.count("max_window_layers", 28, allow_zero=True)
    if not read.flag("use_sliding_window") or window is None:
        return equal_windows(read, None)
    layers = read.count("num_hidden_layers")
    kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return read_windows(read, {FULL: None, SLIDING: window}, kinds)


# the scaling types of the family; the two older names stand for longrope
KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


def read_unrotated(read: ConfigReader) -> tuple[int, ...]:
    """Return the layers without rotation: those with a 0 in a list, or else the last of each interval."""
    layers, interval = read.count("num_hidden_layers"), read.count("no_rope_layer_interval", 4)
    listed = read.take("no_rope_layers")
    if listed is None:
        listed = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        raise read.error("no_rope_layers", f"it must hold a 1 or a 0 for each of the {layers} layers")
    return tuple(layer for layer in range(layers) if not listed[layer])


# the keys that its modelling code reads, besides those that all families share
KEYS = frozenset({"bias", "hidden_act", "pretraining_tp"})
CODE = "modeling_internlm2.InternLM2ForCausalLM"  # the modelling code that this family stands for
INTERNLM2 = Naming(
    outer={"tok_embeddings": EMBEDDING, "norm": LAST_NORM},
    inner={
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wqkv": "self_attn.qkv_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
    heads=("output",),
)


GLM4 = Naming(
    inner={
        **LLAMA_INNER,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "mlp.gate_up_proj": "mlp.gate_up_proj",
    }
)
ENDS = [151329, 151336, 151338]  # the default end-of-text ids


# what GGUF files say in keys of their own; without one, the value is llama.cpp's


def ministral3_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a Mistral, or of a Ministral 3, whose queries grow; a growth of 0 is none."""
    rope = config["rope_parameters"]
    rope.setdefault(ORIGINAL, read.count(ORIGINAL_KEY, config["max_position_embeddings"]))
    growth = read.optional_number("attention.temperature_scale", zero_is_null=True)
    if read.take("attention.temperature_length", rope[ORIGINAL]) != rope[ORIGINAL]:
        raise read.error("attention.temperature_length", f"{ORIGINAL_KEY} is {rope[ORIGINAL]}")
    log = read.optional_number("rope.scaling.yarn_log_multiplier", zero_is_null=True)
    scales = {} if log is None or rope["rope_type"] != "yarn" else {"mscale": 1.0, "mscale_all_dim": log}
    return {"rope_parameters": {**rope, **scales, "llama_4_scaling_beta": growth or 0.0}}


def phi3_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    head_dim, rope = config["head_dim"], config["rope_parameters"]
    rotated = read.count("rope.dimension_count", head_dim)
    share = rotated / head_dim
    if int(head_dim * share) != rotated:  # the quotient was rounded down
        share = (rotated + 0.5) / head_dim
    window = None if read.take("attention.sliding_window", 0) == 0 else read.count("attention.sliding_window")
    found = {"sliding_window": window, "rope_parameters": rope | {"partial_rotary_factor": share}}
    if not any(map(read.has_tensor, read.LONG_ROPE)):
        return found
    short, long = (read.factors(name, rotated // 2) for name in read.LONG_ROPE)
    found["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": share,
        "short_factor": short,
        "long_factor": long,
        "attention_factor": read.number("rope.scaling.attn_factor", 1.0),
    }
    return found | {ORIGINAL: read.count(ORIGINAL_KEY)}


def olmo2_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of OLMo 2, or of OLMo 3, which has windows."""
    if not read.has("attention.sliding_window"):
        return {}
    # llama.cpp scales the rotation of layers with full attention only
    windowed = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    ropes = {FULL: config["rope_parameters"], SLIDING: windowed}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return read.windows(config) | olmo3 | {"rope_parameters": ropes}


def exaone4_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    if read.has("attention.sliding_window"):
        return read.windows(config)
    return {"sliding_window": None, "layer_types": [FULL] * config["num_hidden_layers"]}


def cohere2_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    layers = range(1, config["num_hidden_layers"] + 1)
    return {
        "logit_scale": read.number("logit_scale"),
        "sliding_window": read.count("attention.sliding_window"),
        # llama.cpp gives every fourth layer full attention, whatever the model
        "layer_types": [SLIDING if layer % 4 else FULL for layer in layers],
    }


FUSED_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
SEED_OSS = {part: name for part, name in LAYER.items() if part != "ffn_norm"}
SEED_OSS["post_attention_norm"] = LAYER["ffn_norm"]
RMS_EPS = ("rms_norm_eps", 1e-5)
BOTH_BIASES = WITH_BIASES | {"mlp_bias": False}
OLMO: dict[str, Any] = {
    "flags": WITH_BIASES, "norm_eps": RMS_EPS, "eos": 50279, "bos": None, "positions": 2048,
    "fixed": {"norm_float32": True, "pre_norms": False, "post_norms": True, "projection_norms": True},
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "heads": Heads(8), "windows": mistral_windows, "eos": 2, "bos": 1, "positions": 131_072,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": Family(
        "cohere2", cohere2, eos=255001, bos=5, positions=8192, heads=Heads(divided=True), windows=None,
        flags=WITH_BIASES | {"tied": True}, norm_eps=("layer_norm_eps", 1e-5),
        fixed={"layer_norms": True, "interleaved": True, "parallel_residual": True, "shared_norm": True},
        gguf=(GGUF("cohere2", cohere2_in_gguf, biases=ATTENTION_BIAS, norm_key="layer_norm_eps"),),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", exaone4, eos=2, bos=0, positions=2048, heads=Heads(32, null_kv=False), windows=None,
        norm_eps=RMS_EPS, fixed={"pre_norms": False, "post_norms": True, "head_norms": True},
        gguf=(GGUF("exaone4", exaone4_in_gguf, parts=NORMED_AFTER),),
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        lambda read: with_longest(read)
        | {"qkv_bias": read.flag("attention_bias", default=True, if_null=False)},
        eos=ENDS, bos=None, positions=131_072, heads=Heads(2, null_kv=False, dim=128, null_dim=False),
        norm_eps=("rms_norm_eps", 1.5625e-7),
        rope=lambda read, head_dim: read_rope(read, head_dim=head_dim, share=0.5),
        fixed={"interleaved": True, "naming": GLM4, "fused_gate_up": True, "post_norms": True},
        gguf=(GGUF("glm4", biases=ATTENTION_BIAS, rope="part", parts=NORMED_TWICE | FUSED_GATE_UP),),
    ),
    "GraniteForCausalLM": Family(
        "granite", granite, eos=2, bos=1, positions=2048, flags=BOTH_BIASES,
        gguf=(
            GGUF(
                "granite",
                lambda read, config: {
                    "attention_multiplier": read.number("attention.scale", config["head_dim"] ** -0.5),
                    "embedding_multiplier": read.number("embedding_scale", 1.0),
                    "residual_multiplier": read.number("residual_scale", 1.0),
                    "logits_scaling": read.number("logit_scale"),
                },
                biases=BIASES, reordered=True,
            ),
        ),
    ),
    "InternLM2ForCausalLM": Family(
        "internlm2", internlm2, eos=2, bos=1, positions=2048, keys=SHARED_KEYS | KEYS,
        fixed={"fused_qkv": True, "grouped_qkv": True, "naming": INTERNLM2},
    ),
    "LlamaForCausalLM": Family(
        "llama", with_longest, eos=2, bos=1, positions=2048, flags=BOTH_BIASES,
        gguf=tuple(  # llama.cpp's converter makes a Llama of an InternLM 2
            GGUF(name, biases=BIASES, windows=False, reordered=True) for name in ("llama", "internlm2")
        ),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3", ministral3, eos=2, bos=1, positions=262_144, heads=Heads(8, dim=128), rope=None,
        windows=window_of_all, norm_eps=RMS_EPS,
        gguf=(GGUF("mistral3", ministral3_in_gguf, reordered=True),),
    ),
    "MinistralForCausalLM": Family("ministral", **MISTRAL),
    "MistralForCausalLM": Family("mistral", **MISTRAL),
    "Olmo2ForCausalLM": Family(
        "olmo2", with_longest, **OLMO,
        gguf=(GGUF("olmo2", olmo2_in_gguf, biases=ATTENTION_BIAS, parts=NORMED_AFTER),),
    ),
    "Olmo3ForCausalLM": Family("olmo3", olmo3, rope=None, windows=None, **OLMO),
    "Phi3ForCausalLM": Family(
        "phi3", eos=32_000, bos=1, positions=4096, windows=window_of_all, norm_eps=RMS_EPS,
        rope=lambda read, head_dim: read_rope(read, head_dim=head_dim, original=4096, kinds=KINDS),
        fixed={"fused_qkv": True, "fused_gate_up": True},
        gguf=(GGUF("phi3", phi3_in_gguf, rope="part", parts=FUSED_QKV | FUSED_GATE_UP),),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", eos=None, bos=None, positions=32_768, heads=Heads(32), windows=qwen_windows,
        fixed={"qkv_bias": True}, gguf=(GGUF("qwen2", windows=False),),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", eos=None, bos=None, positions=32_768, heads=Heads(32, dim=128, null_dim=False),
        windows=qwen_windows, flags=WITH_BIASES, fixed={"head_norms": True},
        gguf=(GGUF("qwen3", biases=ATTENTION_BIAS, windows=False),),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss", seed_oss, eos=2, bos=0, positions=524_288, heads=Heads(8, dim=128),
        flags=FLAGS | {"mlp_bias": False},
        gguf=(GGUF("seed_oss", biases=BIASES | {"attention_out_bias": "attn_output"}, parts=SEED_OSS),),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", smollm3, eos=128_001, bos=128_000, positions=32_768, heads=Heads(4), windows=None,
        rope=lambda read, head_dim: read_rope(read, 2_000_000.0), flags=BOTH_BIASES | {"tied": True},
        # llama.cpp rotates all but every fourth layer, whatever the model
        gguf=(GGUF("smollm3", fixed={"no_rope_layer_interval": 4}, biases=BIASES, reordered=True),),
    ),
}  # fmt: skip
