"""The keys of `config.json` for files of Gemma 4, whose layers have sizes of their own.

Contract: as in `gguf_config.py`, whose table names this function. A file lists what differs by layer, and has
the sizes of heads in layers with full attention under the usual keys. Its rotary factors divide the
frequencies that do not turn by a number so large that nothing of them is left.

Source: https://github.com/ggml-org/llama.cpp/blob/master/conversion/gemma.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foredraft.model.gguf.names import ROPE_FACTORS
from foredraft.model.gguf.tensors import PLAIN, stored_values

if TYPE_CHECKING:
    from foredraft.model.gguf.gguf_config import Reader

__all__ = ["BY_LAYER", "gemma4"]

FULL, SLIDING = "full_attention", "sliding_attention"
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # keys that may hold a list, a number a layer
PATTERN = "attention.sliding_window_pattern"
STILL = 1e30  # what frequencies that do not turn are divided by


def gemma4(read: Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of Gemma 4."""
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


def _windowed(read: Reader, layers: int) -> list[bool]:
    given = read.take(PATTERN)
    if not isinstance(given, list) or len(given) != layers or given[-1]:
        raise read.error(PATTERN, f"it must be a list of {layers} flags, of which the last is false")
    return [bool(each) for each in given]


def _by_layer(read: Reader, key: str, layers: int) -> list[int]:
    """Return a number for each layer: that of a list, or one for all."""
    given = read.take(key)
    if not isinstance(given, list):
        return [read.count(key)] * layers
    if len(given) != layers or not all(isinstance(each, int) and each > 0 for each in given):
        raise read.error(key, f"it must be {layers} whole numbers above 0")
    return given


def _joined(read: Reader, full: list[int]) -> bool:
    """Return whether layers with full attention have no projection of values, so that these are the keys."""
    lacking = {not read.has_tensor(f"blk.{layer}.attn_v.weight") for layer in full}
    if len(lacking) > 1:
        raise read.file.error(
            "has projections of values in some layers with full attention alone", "convert the model again"
        )
    return lacking == {True}


def _turning(read: Reader, head_dim: int) -> float:
    """Return the share of the frequencies that turn, which come first."""
    info = read.file.tensors.get(ROPE_FACTORS)
    if info is None or info.kind not in PLAIN or info.shape != (head_dim // 2,):
        raise read.file.error(f"has no {head_dim // 2} numbers in {ROPE_FACTORS}", "convert the model again")
    given = stored_values(read.file, info).float()
    count = int((given == 1.0).sum())
    if not torch.equal(given, torch.where(torch.arange(len(given)) < count, 1.0, STILL).float()) or not count:
        raise read.file.error(
            f"has other numbers in {ROPE_FACTORS} than 1 and {STILL:g}", "give the model's checkpoint folder"
        )
    return count / len(given)
