"""The supported architectures: which keys of a `config.json` each reads, and what they mean there.

Contract: a family is one line of `FAMILIES` and one small function that turns its keys into fields of
`ModelSpec`. A key that is absent has the value that `transformers` gives it in that family.

Soft-caps and alternating windows: Gemma 2 (arXiv:2408.00118). Windows in every layer: Mistral
(arXiv:2310.06825). Biases of queries, keys and values: Qwen 2 (arXiv:2407.10671). Norms of queries and keys:
Qwen 3 (arXiv:2505.09388), Gemma 3 (arXiv:2503.19786), which also rotates its windowed layers by another base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.model.config import ConfigReader, shortened
from foredraft.model.rope_config import read_rope, read_ropes

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture reads besides the common sizes, and the ids it means where none are given."""

    model_type: str
    fields: Callable[[ConfigReader], dict[str, Any]]
    eos: int | None
    bos: int | None


def _llama(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", null=False)
    return _plain(read, read.count("num_key_value_heads", heads, null=heads), _share(read)) | {
        "windows": _windows(read, {FULL: None}, [FULL]),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": read.flag("mlp_bias", null=False),
    }


def _mistral(read: ConfigReader) -> dict[str, Any]:
    heads, window = read.count("num_attention_heads"), _window(read)
    kind = FULL if window is None else SLIDING
    return _plain(read, read.count("num_key_value_heads", 8, null=heads), _share(read)) | {
        "windows": _windows(read, {kind: window}, [kind]),
    }


def _qwen2(read: ConfigReader) -> dict[str, Any]:
    heads = read.count("num_attention_heads")
    return _plain(read, read.count("num_key_value_heads", 32, null=heads), _share(read)) | {
        "windows": _qwen_windows(read),
        "qkv_bias": True,
    }


def _qwen3(read: ConfigReader) -> dict[str, Any]:
    heads, attention_bias = read.count("num_attention_heads"), read.flag("attention_bias", null=False)
    kv_heads = read.count("num_key_value_heads", 32, null=heads)
    return _plain(read, kv_heads, read.count("head_dim", 128)) | {
        "windows": _qwen_windows(read),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "head_norms": True,
    }


def _plain(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """What Llama and those after its fashion have in common."""
    return _heads(read, kv_heads, head_dim) | {
        "rope": read_rope(read),
        "attention_scale": head_dim**-0.5,
        "activation": _activation(read, "hidden_act", default="silu"),
        "tied": read.flag("tie_word_embeddings", default=False),
    }


def _gemma2(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    if read.take("sliding_window_size") not in (None, window):  # Gemma-2-9B has both
        raise read.wrong("sliding_window_size", f"it must equal sliding_window, {window}")
    return _gemma(read) | {
        "rope": read_rope(read),
        "windows": _windows(read, {SLIDING: window, FULL: None}, [SLIDING, FULL]),
        "attention_softcap": read.optional("attn_logit_softcapping", 50.0),
        "logit_softcap": read.optional("final_logit_softcapping", 30.0),
    }


def _gemma3(read: ConfigReader) -> dict[str, Any]:
    rope, window_rope = read_ropes(read)
    return _gemma(read) | {
        "rope": rope,
        "window_rope": window_rope,
        "windows": _gemma3_windows(read),
        "logit_softcap": read.optional("final_logit_softcapping"),
        "head_norms": True,
    }


def _gemma(read: ConfigReader) -> dict[str, Any]:
    """What Gemma 2 and Gemma 3 have in common."""
    attention_bias = read.flag("attention_bias", null=False)
    read.seen.add("hidden_act")  # the reference reads hidden_activation alone
    return _heads(read, read.count("num_key_value_heads", 4), read.count("head_dim", 256)) | {
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
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, eos=1, bos=2),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3, eos=1, bos=2),
    "LlamaForCausalLM": Family("llama", _llama, eos=2, bos=1),
    "MistralForCausalLM": Family("mistral", _mistral, eos=2, bos=1),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, eos=None, bos=None),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, eos=None, bos=None),
}


def _share(read: ConfigReader) -> int:
    """A head's size, by default its share of the hidden size."""
    share = max(1, read.count("hidden_size") // read.count("num_attention_heads"))
    return read.count("head_dim", share, null=share)


def _heads(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    heads = read.count("num_attention_heads")
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_key_value_heads = {kv_heads} does not divide {heads} heads")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim = {head_dim} is odd; rotary positions need an even one")
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _activation(read: ConfigReader, key: str, default: str) -> str:
    name = read.take(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} = {shortened(name)} is not supported; supported are "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _window(read: ConfigReader) -> int | None:
    """Mistral's and Qwen's window; null asks for none."""
    return None if read.take("sliding_window", 4096) is None else read.count("sliding_window", 4096)


def _qwen_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Windows are switched on by a flag, and count from a layer on."""
    window, first = _window(read), read.count("max_window_layers", 28, zero=True)
    if not read.flag("use_sliding_window") or window is None:
        return _windows(read, {FULL: None}, [FULL])
    layers = read.count("num_hidden_layers")
    kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    return _windows(read, {FULL: None, SLIDING: window}, kinds)


def _gemma3_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Every sixth layer sees everything, unless the older `sliding_window_pattern` names another."""
    pattern = read.count("sliding_window_pattern", 6)
    kinds = [
        FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(read.count("num_hidden_layers"))
    ]
    listed = read.take("layer_types")
    if "sliding_window_pattern" in read.config and listed not in (None, kinds):
        raise read.wrong("sliding_window_pattern", "layer_types says otherwise; keep the one that is right")
    # what transformers notes beside layer_types, and does not read
    if read.take("_sliding_window_pattern") not in (None, pattern) and listed is None:
        raise read.wrong("_sliding_window_pattern", "give layer_types")
    return _windows(read, {SLIDING: read.count("sliding_window", 4096), FULL: None}, kinds)


def _windows(read: ConfigReader, known: dict[str, int | None], kinds: list[str]) -> tuple[int | None, ...]:
    """One window a layer, from the known kinds of layer; without `layer_types`, `kinds` are taken in turn."""
    layers = read.count("num_hidden_layers")
    listed = read.take("layer_types")
    if listed is None:
        listed = [kinds[layer % len(kinds)] for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in [*known] for kind in listed):
        raise read.wrong("layer_types", f"it must name {' or '.join(known)} for each of the {layers} layers")
    return tuple(known[kind] for kind in listed)
