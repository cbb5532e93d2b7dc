"""The keys of `config.json` that files of one architecture alone have; without one, the value is llama.cpp's.

A null key is one that the family lacks.

The sizes of heads in layers with full attention stand under the usual keys. Rotary factors divide the
frequencies that do not turn by a number so large that nothing of them is left. Source:
https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foredraft.model.families.shared import FULL, SLIDING
from foredraft.model.gguf.tensors import LONG_FACTORS, PLAIN, ROPE_FACTORS, SHORT_FACTORS, stored_values

if TYPE_CHECKING:
    from foredraft.model.gguf.gguf_config import MetadataReader


ORIGINAL, ORIGINAL_KEY = "original_max_position_embeddings", "rope.scaling.original_context_length"
WINDOW = "attention.sliding_window"
UNROTATED = 4  # llama.cpp rotates none of every so many layers of SmolLM 3, whatever the model


def gemma(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": read.rope(sizes),
    }


def granite(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {
        "attention_multiplier": read.number("attention.scale", sizes["head_dim"] ** -0.5),
        "embedding_multiplier": read.number("embedding_scale", 1.0),
        "residual_multiplier": read.number("residual_scale", 1.0),
        "logits_scaling": read.number("logit_scale"),
        "rope_parameters": read.rope(sizes),
    }


def mistral3(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    """A Mistral, or a Ministral 3, whose queries grow; a growth of 0 is none."""
    rope = read.rope(sizes)
    rope.setdefault(ORIGINAL, read.count(ORIGINAL_KEY, sizes["max_position_embeddings"]))
    growth = read.optional_number("attention.temperature_scale", zero_is_null=True)
    if read.take("attention.temperature_length", rope[ORIGINAL]) != rope[ORIGINAL]:
        raise read.error("attention.temperature_length", f"{ORIGINAL_KEY} is {rope[ORIGINAL]}")
    log = read.optional_number("rope.scaling.yarn_log_multiplier", zero_is_null=True)
    scales = {} if log is None or rope["rope_type"] != "yarn" else {"mscale": 1.0, "mscale_all_dim": log}
    return {
        "hidden_act": "silu",
        "rope_parameters": {**rope, **scales, "llama_4_scaling_beta": growth or 0.0},
    }


def phi3(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    head_dim, rope = sizes["head_dim"], read.rope(sizes)
    rotated = read.count("rope.dimension_count", head_dim)
    share = rotated / head_dim
    if int(head_dim * share) != rotated:  # the quotient was rounded down
        share = (rotated + 0.5) / head_dim
    found: dict[str, Any] = {
        "hidden_act": "silu",
        "sliding_window": None if read.take(WINDOW, 0) == 0 else read.count(WINDOW),
        "rope_parameters": {**rope, "partial_rotary_factor": share},
    }
    if not read.has_tensor(LONG_FACTORS) and not read.has_tensor(SHORT_FACTORS):
        return found
    found["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": share,
        "short_factor": _factors(read, SHORT_FACTORS, rotated // 2),
        "long_factor": _factors(read, LONG_FACTORS, rotated // 2),
        "attention_factor": read.number("rope.scaling.attn_factor", 1.0),
    }
    return found | {ORIGINAL: read.count(ORIGINAL_KEY)}


def seed_oss(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {
        "attention_out_bias": read.has_tensor("blk.0.attn_output.bias"),
        "rope_parameters": read.rope(sizes),
    }


def smollm3(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return _biases(read) | {"no_rope_layer_interval": UNROTATED, "rope_parameters": read.rope(sizes)}


def _biases(read: MetadataReader) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": read.has_tensor("blk.0.ffn_up.bias"),
    }


def _factors(read: MetadataReader, name: str, count: int) -> list[float]:
    info = read.file.tensors.get(name)
    if info is None or info.kind not in PLAIN or info.shape != (count,):
        problem = f"has no {count} numbers in {name}"
        raise read.file.error(problem, "convert the model again, or give its checkpoint folder")
    numbers: list[float] = stored_values(read.file, info).float().tolist()
    return numbers


COHERE_PATTERN = 4  # llama.cpp gives every fourth layer of Cohere 2 full attention


def olmo2(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of OLMo 2, or of OLMo 3, which has windows."""
    config: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": read.rope(sizes),
    }
    if not read.has("attention.sliding_window"):
        return config
    # llama.cpp scales the rotation of layers with full attention only
    windowed = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    ropes = {FULL: config["rope_parameters"], SLIDING: windowed}
    return config | windows(read, sizes) | olmo3 | {"rope_parameters": ropes}


def exaone4(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"sliding_window": None, "layer_types": [FULL] * sizes["num_hidden_layers"]}
    if read.has("attention.sliding_window"):
        own = windows(read, sizes)
    return {"hidden_act": "silu", "rope_parameters": read.rope(sizes), **own}


def glm4(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": _partial(read, sizes),
    }


def cohere2(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    kinds = [FULL if (layer + 1) % COHERE_PATTERN == 0 else SLIDING for layer in range(layers)]
    return {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "logit_scale": read.number("logit_scale"),
        "sliding_window": read.count("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": read.rope(sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def starcoder2(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of StarCoder 2, whose window llama.cpp does not know."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": read.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
        "rope_parameters": read.rope(sizes),
        **_layer_norms(sizes, "norm_epsilon"),
    }


def stablelm(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    # a model of parallel residuals has one norm for attention and MLP
    parallel = not read.has_tensor("blk.0.ffn_norm.weight")
    read.flag("use_parallel_residual", default=parallel)  # older files have true in all models
    return {
        "hidden_act": "silu",
        "use_qkv_bias": read.has_tensor("blk.0.attn_q.bias"),
        "qk_layernorm": read.has_tensor("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": parallel,
        "rope_parameters": _partial(read, sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def gpt2(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "intermediate_size": None,
        "n_inner": sizes["intermediate_size"],
        **_layer_norms(sizes, "layer_norm_epsilon"),
    }


def gpt_neox(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu",
        "attention_bias": read.has_tensor("blk.0.attn_qkv.bias"),
        "use_parallel_residual": read.flag("use_parallel_residual", default=True),
        "rope_parameters": _partial(read, sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def phi2(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
        "rope_parameters": _partial(read, sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def _layer_norms(sizes: dict[str, Any], key: str) -> dict[str, Any]:
    return {"rms_norm_eps": None, key: sizes["rms_norm_eps"]}


def _partial(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    head_dim = sizes["head_dim"]
    rotated = read.count("rope.dimension_count", head_dim)
    rope: dict[str, Any] = read.rope(sizes)
    return rope | {"partial_rotary_factor": rotated / head_dim}


def windows(read: MetadataReader, sizes: dict[str, Any], pattern: int = 4) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    given = read.take("attention.sliding_window_pattern", pattern)
    if isinstance(given, list):
        windowed = [bool(each) for each in given]
    else:
        every = read.count("attention.sliding_window_pattern", pattern)
        windowed = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        "sliding_window": read.count("attention.sliding_window"),
        "layer_types": [SLIDING if each else FULL for each in windowed],
    }


BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # keys that may hold a list, a number a layer
PATTERN = "attention.sliding_window_pattern"
STILL = 1e30  # what frequencies that do not turn are divided by


def gemma4(read: MetadataReader, sizes: dict[str, Any]) -> dict[str, Any]:
    layers, full_dim = sizes["num_hidden_layers"], sizes["head_dim"]
    windowed = _windowed(read, layers)
    heads, inner = (_by_layer(read, key, layers) for key in BY_LAYER)
    dim = read.count("attention.key_length_swa", full_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if read.count(key, dim) != dim:
            raise read.error(key, f"only the size of a windowed layer's key head, {dim}, is supported")
    shared = read.count("attention.shared_kv_layers", 0, allow_zero=True)
    first, wide = layers - shared, inner[-1] != inner[0]
    if wide and inner != [*[inner[0]] * first, *[2 * inner[0]] * shared]:
        raise read.error("feed_forward_length", "layers that share keys may have twice the usual size")
    size = read.count("embedding_length_per_layer_input", 0, allow_zero=True)
    read.take("expert_feed_forward_length")  # says nothing where there are no experts
    full = [layer for layer in range(layers) if not windowed[layer]]
    usual = next((heads[layer] for layer in range(layers) if windowed[layer]), heads[-1])
    if any(heads[layer] != usual for layer in range(layers) if windowed[layer]):
        raise read.error(BY_LAYER[0], "all windowed layers must have equal heads")
    table = read.file.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "attention_k_eq_v": _joined(read, [layer for layer in full if layer < first]),
        "final_logit_softcapping": read.optional_number("final_logit_softcapping", zero_is_null=True),
        "head_dim": dim,
        "num_key_value_heads": usual,
        "per_layer_config": {
            str(layer): {"num_key_value_heads": heads[layer], "head_dim": full_dim} for layer in full
        },
        "intermediate_size": inner[0],
        "use_double_wide_mlp": wide,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": sizes["vocab_size"] if table is None else table.shape[0],
        "sliding_window": read.count("attention.sliding_window"),
        "layer_types": [SLIDING if each else FULL for each in windowed],
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": read.number("rope.freq_base"),
                "partial_rotary_factor": _turning(read, full_dim),
            },
            SLIDING: {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa")},
        },
    }


def _windowed(read: MetadataReader, layers: int) -> list[bool]:
    given = read.take(PATTERN)
    if not isinstance(given, list) or len(given) != layers or given[-1]:
        raise read.error(PATTERN, f"it must be a list of {layers} flags, of which the last is false")
    return [bool(each) for each in given]


def _by_layer(read: MetadataReader, key: str, layers: int) -> list[int]:
    given = read.take(key)
    if not isinstance(given, list):
        return [read.count(key)] * layers
    if len(given) != layers or not all(isinstance(each, int) and each > 0 for each in given):
        raise read.error(key, f"it must be {layers} whole numbers above 0")
    return given


def _joined(read: MetadataReader, full: list[int]) -> bool:
    """Return whether layers with full attention have no projection of values, so that these are the keys."""
    lacking = {not read.has_tensor(f"blk.{layer}.attn_v.weight") for layer in full}
    if len(lacking) > 1:
        problem = "has projections of values in some layers with full attention alone"
        raise read.file.error(problem, "convert the model again")
    return lacking == {True}


def _turning(read: MetadataReader, head_dim: int) -> float:
    """Return the share of the frequencies that turn, which come first."""
    info = read.file.tensors.get(ROPE_FACTORS)
    if info is None or info.kind not in PLAIN or info.shape != (head_dim // 2,):
        raise read.file.error(f"has no {head_dim // 2} numbers in {ROPE_FACTORS}", "convert the model again")
    given = stored_values(read.file, info).float()
    count = int((given == 1.0).sum())
    if not torch.equal(given, torch.where(torch.arange(len(given)) < count, 1.0, STILL).float()) or not count:
        problem = f"has other numbers in {ROPE_FACTORS} than 1 and {STILL:g}"
        raise read.file.error(problem, "give the model's checkpoint folder")
    return count / len(given)
