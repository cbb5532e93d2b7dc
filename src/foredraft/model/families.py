"""The supported architectures: which keys of a `config.json` each one reads, and how.

Contract: a family is one line of `FAMILIES` and one function that turns config keys into fields of
`ModelSpec`. An absent key has the default that `transformers` gives it in that family.

    Mistral   sliding window in every layer (arXiv:2310.06825)
    Qwen 2    biases of queries, keys and values (arXiv:2407.10671)
    Qwen 3    norms of queries and keys (arXiv:2505.09388)
    Gemma 2   soft-caps, alternating sliding windows (arXiv:2408.00118)
    Gemma 3   norms of queries and keys, a rotary base of its own in windowed layers (arXiv:2503.19786)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import MAX_KEY_WIDTH, MAX_WIDTH, ConfigReader
from foredraft.model.rope_config import read_rope, read_ropes

# the activation of a config -> the name that `layers.gate` knows
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        model_type: The `model_type` of its config.
        fields: Reads the config keys of the architecture into fields of `ModelSpec`.
        eos: The end-of-text id of a checkpoint that names none.
        bos: The beginning-of-text id of a checkpoint that names none.
        positions: `max_position_embeddings` of a checkpoint that names none.
    """

    model_type: str
    fields: Callable[[ConfigReader], dict[str, Any]]
    eos: int | None
    bos: int | None
    positions: int


def _llama(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    return _llama_like(read, read.count("num_key_value_heads", heads, if_null=heads), _head_dim(read)) | {
        "windows": _windows(read, {FULL: None}, [FULL]),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias", if_null=False),
        "longest": _longest(read),
    }


def _longest(read: ConfigReader) -> int | None:
    """Return the length up to which `sliding_window` changes nothing; None is any length.

    A Llama of transformers attends to the whole prompt, but while it decodes its cache keeps one window. Past
    that length its text depends on how the prompt was passed, so there is nothing to be equal to.
    """
    window = None if read.take("sliding_window") is None else read.count("sliding_window")
    return window if read.take("layer_types") is None else None


def _mistral(read: ConfigReader) -> dict[str, Any]:
    heads, window = read.count("num_attention_heads"), _window(read)
    kind = FULL if window is None else SLIDING
    return _llama_like(read, read.count("num_key_value_heads", 8, if_null=heads), _head_dim(read)) | {
        "windows": _windows(read, {FULL: None, kind: window}, [kind]),
    }


def _qwen2(read: ConfigReader) -> dict[str, Any]:
    heads = read.count("num_attention_heads")
    return _llama_like(read, read.count("num_key_value_heads", 32, if_null=heads), _head_dim(read)) | {
        "windows": _qwen_windows(read),
        "qkv_bias": True,
    }


def _qwen3(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", if_null=False)
    kv_heads = read.count("num_key_value_heads", 32, if_null=heads)
    return _llama_like(read, kv_heads, read.count("head_dim", 128)) | {
        "windows": _qwen_windows(read),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "head_norms": True,
    }


def _llama_like(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the fields that Llama, Mistral and Qwen share."""
    return _head_sizes(read, kv_heads, head_dim) | {
        "rope": read_rope(read),
        "attention_scale": head_dim**-0.5,
        "activation": _activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
    }


def _gemma2(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    if read.take("sliding_window_size") not in (None, window):  # the name that exllamav2 reads, too
        raise read.error("sliding_window_size", f"it must equal sliding_window, {window}")
    return _gemma_common(read) | {
        "rope": read_rope(read),
        "windows": _windows(read, {SLIDING: window, FULL: None}, [SLIDING, FULL]),
        "attention_softcap": read.optional_number("attn_logit_softcapping", 50.0),
        "logit_softcap": read.optional_number("final_logit_softcapping", 30.0),
    }


def _gemma3(read: ConfigReader) -> dict[str, Any]:
    rope, window_rope = read_ropes(read)
    return _gemma_common(read) | {
        "rope": rope,
        "window_rope": window_rope,
        "windows": _gemma3_windows(read),
        "logit_softcap": read.optional_number("final_logit_softcapping"),
        "head_norms": True,
    }


def _gemma_common(read: ConfigReader) -> dict[str, Any]:
    """Return the fields that Gemma 2 and Gemma 3 share."""
    attention_bias = read.flag("attention_bias", if_null=False)
    return _head_sizes(read, read.count("num_key_value_heads", 4), read.count("head_dim", 256)) | {
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "activation": _activation(read, "hidden_activation", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "norm_offset": True,
        "post_norms": True,
    }


FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, eos=1, bos=2, positions=8192),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3, eos=1, bos=2, positions=131_072),
    "LlamaForCausalLM": Family("llama", _llama, eos=2, bos=1, positions=2048),
    "MistralForCausalLM": Family("mistral", _mistral, eos=2, bos=1, positions=131_072),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, eos=None, bos=None, positions=32_768),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, eos=None, bos=None, positions=32_768),
}


def _head_dim(read: ConfigReader) -> int:
    """Return the size of a head, by default the hidden size divided by the number of heads."""
    default = max(1, read.count("hidden_size") // read.count("num_attention_heads"))
    return read.count("head_dim", default, if_null=default)


def _head_sizes(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of the heads, after checking that they fit together."""
    heads = read.count("num_attention_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}",
            remedy="correct one of them",
        )
    widths = (("num_attention_heads", heads, MAX_WIDTH), ("num_key_value_heads", kv_heads, MAX_KEY_WIDTH))
    for key, count, most in widths:
        if count * head_dim > most:
            raise CheckpointError(
                f"config.json: {key} = {count} and head_dim = {head_dim}",
                remedy=f"their product must not be more than {most}",
            )
    if head_dim % 2:
        raise CheckpointError(
            f"config.json: head_dim = {head_dim}", remedy="rotary embeddings need an even number"
        )
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _activation(read: ConfigReader, key: str, default: str) -> str:
    name = read.take(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} = {shortened(name)} is not supported",
            remedy=f"supported are {', '.join(sorted(ACTIVATIONS))}",
        )
    return ACTIVATIONS[name]


def _window(read: ConfigReader) -> int | None:
    """Return the sliding window of Mistral and Qwen in positions; None for null."""
    return None if read.take("sliding_window", 4096) is None else read.count("sliding_window", 4096)


def _qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Qwen's windows: enabled by `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = _window(read), read.count("max_window_layers", 28, allow_zero=True)
    if not read.flag("use_sliding_window") or window is None:
        return _windows(read, {FULL: None}, [FULL])
    layers = read.count("num_hidden_layers")
    kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return _windows(read, {FULL: None, SLIDING: window}, kinds)


def _gemma3_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Gemma 3's windows: full attention in every sixth layer, or every `sliding_window_pattern`-th."""
    pattern = read.count("sliding_window_pattern", 6)
    kinds = [
        FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(read.count("num_hidden_layers"))
    ]
    listed = read.take("layer_types")
    if "sliding_window_pattern" in read.config and listed not in (None, kinds):
        raise read.error("sliding_window_pattern", "layer_types differs from it; keep the key that is right")
    return _windows(read, {SLIDING: read.count("sliding_window", 4096), FULL: None}, kinds)


def _windows(read: ConfigReader, known: dict[str, int | None], kinds: list[str]) -> tuple[int | None, ...]:
    """Return the window of every layer, in positions; None for full attention.

    Args:
        read: The config, whose `layer_types` names the kind of each layer.
        known: The window of each kind of layer that the family supports.
        kinds: The kinds that repeat over the layers where `layer_types` is absent.
    """
    layers = read.count("num_hidden_layers")
    listed = read.take("layer_types")
    if listed is None:
        listed = [kinds[layer % len(kinds)] for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in [*known] for kind in listed):
        raise read.error("layer_types", f"it must name {' or '.join(known)} for each of the {layers} layers")
    return tuple(known[kind] for kind in listed)
