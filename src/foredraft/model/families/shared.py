"""`Family`: what the readers of configs and of GGUF files know of an architecture; keys that many share.

In a GGUF file the channels of q and k that RoPE rotates together may be neighbours (`reordered`), and the
norms of Gemma 1 to 3 are stored as 1 + weight (`adds_one`), as its writer left them
(https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foredraft.errors import CheckpointError, shortened
from foredraft.model.config import MAX_KEY_WIDTH, MAX_WIDTH, ConfigReader
from foredraft.model.rope import Rope, read_rope

if TYPE_CHECKING:
    from foredraft.model.gguf.source import MetadataReader

# the parts of a layer in a GGUF file -> the decoder's names
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMED_TWICE = LAYER | {  # layers whose sub-layers have norms before and after them
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMED_AFTER = {part: name for part, name in NORMED_TWICE.items() if part not in ("attn_norm", "ffn_norm")}
FUSED_QKV = LAYER | {"attn_qkv": "self_attn.qkv_proj"}
ATTENTION_BIAS = {"attention_bias": "attn_q"}
BIASES = ATTENTION_BIAS | {"mlp_bias": "ffn_up"}


@dataclass(frozen=True, slots=True)
class GGUF:
    """How GGUF files hold a family: its `config.json`, and the names of its tensors."""

    architecture: str  # as the file names it
    # the keys of config.json that nothing below says, given those that are known; null: the family lacks it
    keys: Callable[[MetadataReader, dict[str, Any]], dict[str, Any]] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with one value in all files
    activation: str = "silu"
    activation_key: str = "hidden_act"
    biases: Mapping[str, str] = field(default_factory=dict)  # key -> part of layer 0 with a bias
    norm_key: str = "rms_norm_eps"  # of the epsilon of norms
    rope: Literal["whole", "part", "own"] = "whole"  # what of a head is rotated; own: `keys` reads all of it
    windows: bool = True  # a file may have sliding windows, or another attention scale than usual
    by_layer: tuple[str, ...] = ()  # keys of the file that may hold a list, a number a layer
    # of a layer -> in the decoder: modules, or tensors that do not have the same kind there
    parts: Mapping[str, str] = field(default_factory=lambda: LAYER)
    outer: Mapping[str, str] = field(default_factory=dict)  # outside the layers, besides the common ones
    # of a layer behind the model's, which predicts further tokens, beside these -> behind "mtp."
    further: Mapping[str, str] = field(default_factory=dict)
    reordered: bool = False
    adds_one: bool = False


ACTIVATIONS = {  # of a config -> the name that `layers.activate` knows
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
FULL, SLIDING = "full_attention", "sliding_attention"
FLAGS: dict[str, bool | None] = {"tied": False}
WITH_BIASES = FLAGS | {"attention_bias": False}


@dataclass(frozen=True, slots=True)
class Heads:
    """How a config gives the numbers and the size of heads."""

    kv: int | None = None  # the key heads of one that names none; None: as many as query heads
    null_kv: bool = True  # null stands for as many as query heads; otherwise it is refused
    dim: int | None = None  # the size of a head of one that names none; None: the hidden size by the heads
    null_dim: bool = True  # null stands for the hidden size by the heads; otherwise it is refused
    divided: bool = False  # heads divide the hidden size, whatever `head_dim` says
    equal: bool = False  # every query head has a key head of its own

    def read(self, read: ConfigReader) -> dict[str, Any]:
        hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
        share = max(1, hidden // heads)
        if self.divided:
            if hidden % heads:
                raise read.error("num_attention_heads", f"it must divide hidden_size, {hidden}")
            if read.take("head_dim") not in (None, share):
                raise read.error("head_dim", f"only hidden_size divided by num_attention_heads, {share}")
            head_dim = share
        else:
            null = share if self.null_dim else None
            head_dim = read.count("head_dim", share if self.dim is None else self.dim, if_null=null)
        if self.equal:
            if read.take("num_key_value_heads") not in (None, heads):
                raise read.error("num_key_value_heads", f"only num_attention_heads, {heads}, is supported")
            return head_sizes(read, heads, head_dim)
        null = heads if self.null_kv else None
        kv_heads = read.count("num_key_value_heads", heads if self.kv is None else self.kv, if_null=null)
        return head_sizes(read, kv_heads, head_dim)


def head_sizes(read: ConfigReader, kv_heads: int, head_dim: int) -> dict[str, Any]:
    heads = read.count("num_attention_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}",
            remedy="correct one of them",
        )
    widths = (("num_attention_heads", heads, MAX_WIDTH), ("num_key_value_heads", kv_heads, MAX_KEY_WIDTH))
    for key, count, most in widths:
        if count * head_dim > most:
            problem = f"config.json: {key} = {count} and head_dim = {head_dim}"
            raise CheckpointError(problem, remedy=f"their product must not be more than {most}")
    if head_dim % 2:
        problem = f"config.json: head_dim = {head_dim}"
        raise CheckpointError(problem, remedy="rotary embeddings need an even number")
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def read_window(read: ConfigReader, default: int | None = 4096) -> int | None:
    return None if read.take("sliding_window", default) is None else read.count("sliding_window", default)


def window_of_all(read: ConfigReader) -> tuple[int | None, ...]:
    return equal_windows(read, read_window(read, None))


def equal_windows(read: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """Return the window of every layer in a family whose layers all have the given one."""
    kind = FULL if window is None else SLIDING
    return read_windows(read, {kind: window}, [kind])


def full_layers(windows: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(layer for layer, window in enumerate(windows) if window is None)


def read_windows(
    read: ConfigReader, known: dict[str, int | None], kinds: list[str]
) -> tuple[int | None, ...]:
    """Return the window of every layer, in positions; None for full attention."""
    layers = read.count("num_hidden_layers")
    listed = read.take("layer_types")
    if listed is None:
        listed = [kinds[layer % len(kinds)] for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(kind not in [*known] for kind in listed):
        raise read.error("layer_types", f"it must name {' or '.join(known)} for each of the {layers} layers")
    return tuple(known[kind] for kind in listed)


def longest(read: ConfigReader) -> int | None:
    """Return the length up to which `sliding_window` changes nothing; None is any length.

    A Llama of transformers attends to the whole prompt, but while it decodes its cache keeps one window. Past
    that length its text depends on how the prompt was passed, so there is nothing to be equal to.
    """
    window = read_window(read, None)
    return window if read.take("layer_types") is None else None


def with_longest(read: ConfigReader) -> dict[str, Any]:
    return {"longest": longest(read)}


@dataclass(frozen=True, slots=True)
class Family:
    """Turns a config into fields of `ModelSpec`, and says what files hold."""

    model_type: str  # the `model_type` of its config
    own: Callable[[ConfigReader], dict[str, Any]] | None = None  # reads further fields, which count most
    _: KW_ONLY
    eos: int | list[int] | None  # the end-of-text id of a checkpoint that names none
    bos: int | None  # the beginning-of-text id of a checkpoint that names none
    positions: int  # `max_position_embeddings` of a checkpoint that names none
    heads: Heads = Heads()
    # of a config and the size of a head; None: `own` reads it
    rope: Callable[[ConfigReader, int], Rope] | None = lambda read, head_dim: read_rope(read)
    windows: Callable[[ConfigReader], tuple[int | None, ...]] | None = lambda read: equal_windows(read, None)
    activation: tuple[str, str] = ("hidden_act", "silu")  # its key, and its default
    flags: Mapping[str, bool | None] = field(default_factory=lambda: FLAGS)  # a config may set -> defaults
    norm_eps: tuple[str, float] | float = ("rms_norm_eps", 1e-6)  # its key and its default, or a number
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields with one value
    # the config keys that the reference reads, where `transformers` has no class of the architecture
    keys: frozenset[str] | None = None
    # keys of a config that the architecture has other names for, too -> these
    spelled: Mapping[str, str] = field(default_factory=dict)
    inner_key: str = "intermediate_size"  # the key of the size of an MLP
    gguf: tuple[GGUF, ...] = ()  # the architectures of GGUF files that hold it

    def size_key(self, key: str, config: Mapping[str, Any]) -> str:
        """Return how a config of the architecture spells the key of a size."""
        if key == "intermediate_size":
            return self.inner_key
        own = self.spelled.get(key, key)
        return own if own in config else key

    def fields(self, read: ConfigReader) -> dict[str, Any]:
        fields = self.heads.read(read)
        head_dim, flags, eps = fields["head_dim"], self.flags, self.norm_eps
        if self.rope is not None:
            fields["rope"] = self.rope(read, head_dim)
        if self.windows is not None:
            fields["windows"] = self.windows(read)
        key, default = self.activation
        name = read.take(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            problem = f"config.json: {key} = {shortened(name)} is not supported"
            raise CheckpointError(problem, remedy=f"supported are {', '.join(sorted(ACTIVATIONS))}")
        fields |= {"attention_scale": head_dim**-0.5, "activation": ACTIVATIONS[name]}
        fields["tied"] = read.flag("tie_word_embeddings", default=bool(flags["tied"]))
        if (bias := flags.get("attention_bias")) is not None:
            fields["qkv_bias"] = fields["output_bias"] = read.flag("attention_bias", bias, if_null=False)
        if flags.get("mlp_bias") is not None:
            fields["mlp_bias"] = read.flag("mlp_bias", if_null=False)
        fields["norm_eps"] = eps if isinstance(eps, float) else read.number(*eps)
        return {**fields, **self.fixed, **({} if self.own is None else self.own(read))}
