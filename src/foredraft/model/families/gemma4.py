"""Gemma 4: the text model of every size but those with experts.

Layers with full attention have heads of their own number and size, and rotate a share of their channels. In
some checkpoints their values are their keys, as they were projected. In others, the last layers read the keys
and values of the last layer of their kind before them, and every layer takes an embedding of its own.
"""

from __future__ import annotations

from typing import Any

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import FULL, SLIDING, head_sizes, read_activation, read_windows
from foredraft.model.rope_config import read_full_ropes

HEADS = ("num_key_value_heads", "head_dim")  # what layers may have of their own
PATTERN = [*[SLIDING] * 5, FULL]


def gemma4(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of `gemma4_text`."""
    if read.flag("enable_moe_block", if_null=False):
        raise read.error("enable_moe_block", "a model with experts is not supported")
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        read.take(key)  # says nothing where there are no experts
    size = read.count("hidden_size_per_layer_input", 256, if_null=0, allow_zero=True)
    rows = read.count("vocab_size_per_layer_input", 262_144, if_null=0, allow_zero=True)
    if size and rows < read.count("vocab_size"):
        raise read.error("vocab_size_per_layer_input", "it must be vocab_size at least")
    return _fields(read, window=512) | {"layer_input_size": size, "layer_input_rows": rows if size else 0}


def gemma4_unified(read: ConfigReader) -> dict[str, Any]:
    """Return the fields of `gemma4_unified_text`, which has neither experts nor embeddings by layer."""
    return _fields(read, window=1024)


def _fields(read: ConfigReader, window: int) -> dict[str, Any]:
    """Return what all have in common; `window` is that of a checkpoint that names none."""
    if read.take("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": of images alone
        raise read.error("use_bidirectional_attention", 'only "vision" is supported')
    window = read.count("sliding_window", window)
    listed = read_windows(read, {SLIDING: window, FULL: None}, PATTERN)
    windows = (*listed[:-1], None)  # the last layer has full attention, whatever layer_types says
    joined = read.flag("attention_k_eq_v")
    kv_heads, head_dim = read.count("num_key_value_heads", 4), read.count("head_dim", 256)
    full_kv_heads, full_head_dim = _full_heads(read, windows, (kv_heads, head_dim), joined=joined)
    rope, window_rope = read_full_ropes(read)
    if rope == window_rope and full_head_dim != head_dim:
        raise read.error("rope_parameters", "heads of two sizes need rotary parameters that differ")
    head_sizes(read, full_kv_heads, full_head_dim)  # checks them
    sources = _sources(read, windows)
    attention_bias, wide = read.flag("attention_bias", if_null=False), read.flag("use_double_wide_mlp")
    return head_sizes(read, kv_heads, head_dim) | {
        "full_kv_heads": full_kv_heads,
        "full_head_dim": full_head_dim,
        "windows": windows,
        "sources": sources,
        "shared_intermediate_size": 2 * read.count("intermediate_size") if wide and sources else None,
        "rope": rope,
        "window_rope": window_rope,
        "attention_scale": 1.0,
        "logit_softcap": read.optional_number("final_logit_softcapping"),
        "activation": read_activation(read, "hidden_activation", default="gelu_pytorch_tanh"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "norm_float32": True,
        "post_norms": True,
        "head_norms": True,
        "value_norms": True,
        "keys_are_values": joined,
        "layer_scalars": True,
    }


def _full_heads(
    read: ConfigReader, windows: tuple[int | None, ...], usual: tuple[int, int], *, joined: bool
) -> tuple[int, int]:
    """Return the key heads and the size of a head in layers with full attention.

    Args:
        read: The config. `per_layer_config`, which transformers writes, overrides the keys of the checkpoints
            that Google published.
        windows: Of all layers.
        usual: The same of windowed layers.
        joined: Values are keys, without which a number of key heads of their own counts for nothing.
    """
    by_layer = read.take("per_layer_config")
    kv_heads, head_dim = read.take("num_global_key_value_heads"), read.take("global_head_dim")
    if by_layer is None:
        size = read.count("global_head_dim", 512)
        own = kv_heads is not None and joined
        return (read.count("num_global_key_value_heads") if own else usual[0]), size
    for key, value in (("num_global_key_value_heads", kv_heads), ("global_head_dim", head_dim)):
        if value is not None:
            read.ignored[key] = value
    heads = _by_layer(read, by_layer, len(windows), usual)
    full = {own for own, window in zip(heads, windows, strict=True) if window is None}
    windowed = {own for own, window in zip(heads, windows, strict=True) if window is not None}
    if len(full) > 1 or windowed - {usual}:
        raise read.error(
            "per_layer_config", "all layers with full attention must have equal heads, and no other own ones"
        )
    return full.pop()


def _by_layer(read: ConfigReader, given: Any, layers: int, usual: tuple[int, int]) -> list[tuple[int, int]]:
    """Return key heads and the size of a head of every layer, by `per_layer_config`."""
    heads = [usual] * layers
    for key, values in given.items() if isinstance(given, dict) else [("", None)]:
        index = (
            int(key)
            if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 6
            else layers
        )
        if index >= layers or not isinstance(values, dict) or not {*values} <= {*HEADS}:
            raise CheckpointError(
                f"config.json: per_layer_config {shortened({key: values})} is not supported",
                remedy=f"it may give {' and '.join(HEADS)} of each of the {layers} layers",
            )
        own = ConfigReader(values, f"{read.where}, per_layer_config, {key}")
        heads[index] = own.count(HEADS[0], usual[0]), own.count(HEADS[1], usual[1])
    return heads


def _sources(read: ConfigReader, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads; () where each has its own."""
    layers = len(windows)
    shared = read.count("num_kv_shared_layers", 0, if_null=0, allow_zero=True)
    if not shared:
        return ()
    first = layers - shared
    last = {window: layer for layer, window in enumerate(windows[: max(first, 0)])}  # of each kind
    if any(window not in last for window in windows):
        raise read.error(
            "num_kv_shared_layers", "a layer of each kind before the last ones must have keys of its own"
        )
    return (*range(first), *(last[window] for window in windows[first:]))
