"""The keys of `config.json` for files of families with other norms, residuals and positions than Llama.

Contract: as in `gguf_config.py`, whose table names these functions. A null key is one that the family lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.model.gguf.gguf_config import Reader

__all__ = [
    "cohere2",
    "exaone4",
    "glm4",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "phi2",
    "stablelm",
    "starcoder2",
]

FULL, SLIDING = "full_attention", "sliding_attention"
COHERE_PATTERN = 4  # llama.cpp gives every fourth layer of Cohere 2 full attention


def olmo2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
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
    return (
        config
        | _windows(read, sizes)
        | {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "rope_parameters": {FULL: config["rope_parameters"], SLIDING: windowed},
        }
    )


def exaone4(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    windows: dict[str, Any] = {"sliding_window": None, "layer_types": [FULL] * sizes["num_hidden_layers"]}
    if read.has("attention.sliding_window"):
        windows = _windows(read, sizes)
    return {"hidden_act": "silu", "rope_parameters": read.rope(sizes), **windows}


def glm4(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": read.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": _partial(read, sizes),
    }


def cohere2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
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


def starcoder2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of StarCoder 2, whose window llama.cpp does not know."""
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": read.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
        "rope_parameters": read.rope(sizes),
        **_layer_norms(sizes, "norm_epsilon"),
    }


def stablelm(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
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


def gpt2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "intermediate_size": None,
        "n_inner": sizes["intermediate_size"],
        **_layer_norms(sizes, "layer_norm_epsilon"),
    }


def gpt_neox(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu",
        "attention_bias": read.has_tensor("blk.0.attn_qkv.bias"),
        "use_parallel_residual": read.flag("use_parallel_residual", default=True),
        "rope_parameters": _partial(read, sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def phi2(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
        "rope_parameters": _partial(read, sizes),
        **_layer_norms(sizes, "layer_norm_eps"),
    }


def _layer_norms(sizes: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the size of the epsilon under the key of a family with layer norms."""
    return {"rms_norm_eps": None, key: sizes["rms_norm_eps"]}


def _partial(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with the share of a head that is rotated."""
    head_dim = sizes["head_dim"]
    rotated = read.count("rope.dimension_count", head_dim)
    rope: dict[str, Any] = read.rope(sizes)
    return rope | {"partial_rotary_factor": rotated / head_dim}


def _windows(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the window, and which layers have one."""
    layers = sizes["num_hidden_layers"]
    given = read.take("attention.sliding_window_pattern", 4)
    if isinstance(given, list):
        windowed = [bool(each) for each in given]
    else:
        every = read.count("attention.sliding_window_pattern", 4)
        windowed = [(layer + 1) % every != 0 for layer in range(layers)]
    return {
        "sliding_window": read.count("attention.sliding_window"),
        "layer_types": [SLIDING if each else FULL for each in windowed],
    }
