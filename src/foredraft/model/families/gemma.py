"""Gemma 1, 2, 3 and 4: the text models of every size but those with experts.

In Gemma 4, layers with full attention have heads of their own number and size. In some checkpoints their
values are their keys, as projected; in others, the last layers read the keys and values of the last layer of
their kind before them, and every layer takes an embedding of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import ConfigReader
from foredraft.model.families.shared import (
    ATTENTION_BIAS,
    FULL,
    GGUF,
    NORMED_TWICE,
    SLIDING,
    WITH_BIASES,
    Family,
    Heads,
    head_sizes,
    read_windows,
)
from foredraft.model.rope import read_full_ropes, read_ropes

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader


def gemma(read: ConfigReader) -> dict[str, Any]:
    scale = {"embedding_scale": read.count("hidden_size") ** 0.5}
    # in this family "gelu" stands for the approximation by tanh
    return scale | ({"activation": "gelu_tanh"} if read.take("hidden_act") == "gelu" else {})


def gemma_common(read: ConfigReader) -> dict[str, Any]:
    return {
        "attention_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": read.count("hidden_size") ** 0.5,
    }


def gemma2(read: ConfigReader) -> dict[str, Any]:
    window = read.count("sliding_window", 4096)
    if read.take("sliding_window_size") not in (None, window):  # the name that exllamav2 reads, too
        raise read.error("sliding_window_size", f"it must equal sliding_window, {window}")
    return gemma_common(read) | {
        "windows": read_windows(read, {SLIDING: window, FULL: None}, [SLIDING, FULL]),
        "attention_softcap": read.optional_number("attn_logit_softcapping", 50.0),
        "logit_softcap": read.optional_number("final_logit_softcapping", 30.0),
    }


def gemma3(read: ConfigReader) -> dict[str, Any]:
    rope, window_rope = read_ropes(read)
    return gemma_common(read) | {
        "rope": rope,
        "window_rope": window_rope,
        "windows": gemma3_windows(read),
        "logit_softcap": read.optional_number("final_logit_softcapping"),
    }


def gemma3_windows(read: ConfigReader) -> tuple[int | None, ...]:
    """Return Gemma 3's windows: full attention in every sixth layer, or every `sliding_window_pattern`-th."""
    pattern = read.count("sliding_window_pattern", 6)
    layers = read.count("num_hidden_layers")
    kinds = [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(layers)]
    listed = read.take("layer_types")
    if "sliding_window_pattern" in read.config and listed not in (None, kinds):
        raise read.error("sliding_window_pattern", "layer_types differs from it; keep the key that is right")
    return read_windows(read, {SLIDING: read.count("sliding_window", 4096), FULL: None}, kinds)


OWN = ("num_key_value_heads", "head_dim")  # what layers may have of their own
HEADS = Heads(4, null_kv=False, dim=256, null_dim=False)
PATTERN = [*[SLIDING] * 5, FULL]


def gemma4(read: ConfigReader) -> dict[str, Any]:
    if read.flag("enable_moe_block", if_null=False):
        raise read.error("enable_moe_block", "a model with experts is not supported")
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        read.take(key)  # says nothing where there are no experts
    size = read.count("hidden_size_per_layer_input", 256, if_null=0, allow_zero=True)
    rows = read.count("vocab_size_per_layer_input", 262_144, if_null=0, allow_zero=True)
    if size and rows < read.count("vocab_size"):
        raise read.error("vocab_size_per_layer_input", "it must be vocab_size at least")
    return _fields(read, window=512) | {"layer_input_size": size, "layer_input_rows": rows if size else 0}


def _fields(read: ConfigReader, window: int) -> dict[str, Any]:
    """Return what all have in common; `window` is that of a checkpoint that names none."""
    if read.take("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": of images alone
        raise read.error("use_bidirectional_attention", 'only "vision" is supported')
    window = read.count("sliding_window", window)
    listed = read_windows(read, {SLIDING: window, FULL: None}, PATTERN)
    windows = (*listed[:-1], None)  # the last layer has full attention, whatever layer_types says
    joined = read.flag("attention_k_eq_v")
    usual = HEADS.read(read)
    kv_heads, head_dim = usual["kv_heads"], usual["head_dim"]
    full_kv_heads, full_head_dim = _full_heads(read, windows, (kv_heads, head_dim), joined=joined)
    rope, window_rope = read_full_ropes(read)
    if rope == window_rope and full_head_dim != head_dim:
        raise read.error("rope_parameters", "heads of two sizes need rotary parameters that differ")
    head_sizes(read, full_kv_heads, full_head_dim)  # checks them
    sources = _sources(read, windows)
    wide = read.flag("use_double_wide_mlp")
    return {
        "full_kv_heads": full_kv_heads,
        "full_head_dim": full_head_dim,
        "windows": windows,
        "sources": sources,
        "shared_intermediate_size": 2 * read.count("intermediate_size") if wide and sources else None,
        "rope": rope,
        "window_rope": window_rope,
        "attention_scale": 1.0,
        "logit_softcap": read.optional_number("final_logit_softcapping"),
        "embedding_scale": read.count("hidden_size") ** 0.5,
        "keys_are_values": joined,
    }


def _full_heads(
    read: ConfigReader, windows: tuple[int | None, ...], usual: tuple[int, int], *, joined: bool
) -> tuple[int, int]:
    by_layer = read.take("per_layer_config")
    kv_heads, head_dim = read.take("num_global_key_value_heads"), read.take("global_head_dim")
    if by_layer is None:
        size = read.count("global_head_dim", 512)
        own = kv_heads is not None and joined
        return (read.count("num_global_key_value_heads") if own else usual[0]), size
    for key, value in (("num_global_key_value_heads", kv_heads), ("global_head_dim", head_dim)):
        if value is not None:
            read.ignored[key] = value
    heads = _own_heads(read, by_layer, len(windows), usual)
    full = {own for own, window in zip(heads, windows, strict=True) if window is None}
    windowed = {own for own, window in zip(heads, windows, strict=True) if window is not None}
    if len(full) > 1 or windowed - {usual}:
        remedy = "all layers with full attention must have equal heads, and no other own ones"
        raise read.error("per_layer_config", remedy)
    return full.pop()


def _own_heads(read: ConfigReader, given: Any, layers: int, usual: tuple[int, int]) -> list[tuple[int, int]]:
    heads = [usual] * layers
    for key, values in given.items() if isinstance(given, dict) else [("", None)]:
        named = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 6
        index = int(key) if named else layers
        if index >= layers or not isinstance(values, dict) or not {*values} <= {*OWN}:
            problem = f"config.json: per_layer_config {shortened({key: values})} is not supported"
            remedy = f"it may give {' and '.join(OWN)} of each of the {layers} layers"
            raise CheckpointError(problem, remedy=remedy)
        own = ConfigReader(values, f"{read.where}, per_layer_config, {key}")
        heads[index] = own.count(OWN[0], usual[0]), own.count(OWN[1], usual[1])
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
        remedy = "a layer of each kind before the last ones must have keys of its own"
        raise read.error("num_kv_shared_layers", remedy)
    return (*range(first), *(last[window] for window in windows[first:]))


# in GGUF files; heads of layers with full attention stand under the usual keys


# Layers of the Gemma models with 27 billion weights, whose attention scale differs; no file says it.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def gemma3_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    read.number("rope.freq_base")  # the layers with full attention have another base than the usual one
    windowed = {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10_000.0)}
    return _windowed_in_gguf(read, config, pattern=6) | {
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: windowed},
        "final_logit_softcapping": read.optional_number("final_logit_softcapping", zero_is_null=True),
    }


def _windowed_in_gguf(read: MetadataReader, config: dict[str, Any], pattern: int) -> dict[str, Any]:
    large = config["num_hidden_layers"] == LAYERS_OF_27B[read.architecture]
    scalar = config["hidden_size"] / config["num_attention_heads"] if large else config["head_dim"]
    if read.has("attention.scale"):
        scalar = read.exact(read.number("attention.scale") ** -2)
    return {"query_pre_attn_scalar": scalar, **read.windows(config, pattern)}


BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # keys that may hold a list, a number a layer
STILL = 1e30  # what frequencies that do not turn are divided by
WINDOW_PATTERN = "attention.sliding_window_pattern"


def gemma4_in_gguf(read: MetadataReader, config: dict[str, Any]) -> dict[str, Any]:
    layers, full_dim = config["num_hidden_layers"], config["head_dim"]
    windowed = read.take(WINDOW_PATTERN)
    if not isinstance(windowed, list) or len(windowed) != layers or windowed[-1]:
        raise read.error(WINDOW_PATTERN, f"it must be a list of {layers} flags, of which the last is false")
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
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
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
    given = torch.tensor(read.factors(read.ROPE_FACTORS, head_dim // 2))
    count = int((given == 1.0).sum())
    if not torch.equal(given, torch.where(torch.arange(len(given)) < count, 1.0, STILL).float()) or not count:
        problem = f"has other numbers in {read.ROPE_FACTORS} than 1 and {STILL:g}"
        raise read.file.error(problem, "give the model's checkpoint folder")
    return count / len(given)


ONES: dict[str, Any] = {"eos": 1, "bos": 2}
TANH, TIED = "gelu_pytorch_tanh", WITH_BIASES | {"tied": True}
COMMON: dict[str, Any] = ONES | {
    "heads": HEADS, "activation": ("hidden_activation", TANH), "flags": TIED, "windows": None
}  # fmt: skip
OF_4: dict[str, Any] = COMMON | {
    "rope": None,
    "fixed": dict.fromkeys("post_norms norm_float32 head_norms value_norms layer_scalars".split(), True),
}
NORMS = {"post_norms": True, "norm_offset": True}
FILE: dict[str, Any] = {"activation": TANH, "biases": ATTENTION_BIAS}
LATER: dict[str, Any] = FILE | {"activation_key": "hidden_activation", "parts": NORMED_TWICE}
OF_GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
}
FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        "gemma", gemma, **ONES, positions=8192, heads=Heads(16, dim=256, null_dim=False),
        activation=("hidden_act", TANH), flags=TIED, fixed={"norm_offset": True},
        gguf=(GGUF("gemma", adds_one=True, **FILE),),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", gemma2, positions=8192, fixed=NORMS, **COMMON,
        gguf=(
            GGUF(
                "gemma2",
                lambda read, config: _windowed_in_gguf(read, config, pattern=2) | {
                    "attn_logit_softcapping": read.number("attn_logit_softcapping", 50.0),
                    "final_logit_softcapping": read.number("final_logit_softcapping", 30.0),
                },
                adds_one=True, **LATER,
            ),
        ),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", gemma3, positions=131_072, rope=None, fixed={**NORMS, "head_norms": True}, **COMMON,
        gguf=(GGUF("gemma3", gemma3_in_gguf, adds_one=True, **LATER),),
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text", gemma4, positions=131_072, **OF_4,
        gguf=(
            GGUF(
                "gemma4", gemma4_in_gguf, rope="own", by_layer=BY_LAYER,
                **(LATER | {"parts": NORMED_TWICE | OF_GEMMA4}),
            ),
        ),
    ),
    # it has neither experts nor embeddings by layer
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified_text", lambda read: _fields(read, window=1024), positions=262_144, **OF_4
    ),
}  # fmt: skip
