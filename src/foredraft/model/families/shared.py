"""Keys that several families read alike: heads, activations, windows."""

from __future__ import annotations

from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import MAX_KEY_WIDTH, MAX_WIDTH, ConfigReader

# the activation of a config -> the name that `layers.activate` knows
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
FULL, SLIDING = "full_attention", "sliding_attention"


def read_head_dim(read: ConfigReader) -> int:
    """Return the size of a head, by default the hidden size divided by the number of heads."""
    default = max(1, read.count("hidden_size") // read.count("num_attention_heads"))
    return read.count("head_dim", default, if_null=default)


def divided_head_dim(read: ConfigReader) -> int:
    """Return the size of a head in a family whose heads divide the hidden size, whatever `head_dim` says."""
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    if hidden % heads:
        raise read.error("num_attention_heads", f"it must divide hidden_size, {hidden}")
    if read.take("head_dim") not in (None, hidden // heads):
        raise read.error("head_dim", f"only hidden_size divided by num_attention_heads, {hidden // heads}")
    return hidden // heads


def own_heads(read: ConfigReader) -> int:
    """Return the number of heads in a family without shared keys."""
    heads = read.count("num_attention_heads")
    if read.take("num_key_value_heads") not in (None, heads):
        raise read.error("num_key_value_heads", f"only num_attention_heads, {heads}, is supported")
    return heads


def head_sizes(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
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


def read_activation(read: ConfigReader, key: str, default: str) -> str:
    name = read.take(key, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} = {shortened(name)} is not supported",
            remedy=f"supported are {', '.join(sorted(ACTIVATIONS))}",
        )
    return ACTIVATIONS[name]


def read_window(read: ConfigReader) -> int | None:
    """Return the sliding window of Mistral and Qwen in positions; None for null."""
    return None if read.take("sliding_window", 4096) is None else read.count("sliding_window", 4096)


def full_layers(windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the indices of the layers with full attention."""
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def read_windows(
    read: ConfigReader, known: dict[str, int | None], kinds: list[str]
) -> tuple[int | None, ...]:
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
