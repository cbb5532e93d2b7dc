"""Muse Glimmer: gated attention, and norms without weights of embeddings, queries and keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from foredraft.model.config import SHARED_KEYS, ConfigReader
from foredraft.model.families.shared import (
    FULL,
    SLIDING,
    WITH_BIASES,
    Family,
    Heads,
    read_window,
    read_windows,
)
from foredraft.model.rope import read_rope
from foredraft.model.safetensors_file import StoredTensor
from foredraft.model.tensor_names import EMBEDDING, Naming


@dataclass(frozen=True)
class NormedEmbedding(Naming):
    """Names of a model whose embedding is normed: a row is, once, where it is read."""

    eps: float = 1e-5

    def opened(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        tensors, name = super().opened(stored), f"{EMBEDDING}.weight"
        if name not in tensors:
            return tensors
        table = tensors[name]

        def read(rows: slice | None) -> Tensor:
            return F.rms_norm(table[rows or slice(None)].float(), table.shape[1:], None, self.eps)

        return tensors | {name: replace(table, dtype="F32", read=read)}


@functools.cache
def _naming(eps: float) -> NormedEmbedding:
    return NormedEmbedding(eps=eps)


def muse_glimmer(read: ConfigReader) -> dict[str, Any]:
    layers, window, rope = read.count("num_hidden_layers"), read_window(read, 2048), read_rope(read)
    from_last = [SLIDING if (layers - 1 - layer) % 4 else FULL for layer in range(layers)]
    known: dict[str, int | None] = {FULL: None} if window is None else {FULL: None, SLIDING: window}
    bases = read.take("layer_rope_theta")
    if bases is None:
        bases = [rope.theta if kind == SLIDING else 0 for kind in from_last]
    each = isinstance(bases, list) and len(bases) == layers
    if not each or any(base not in (0, rope.theta) for base in bases):
        remedy = f"it must hold {rope.theta:g} or 0 for each of the {layers} layers"
        raise read.error("layer_rope_theta", remedy)
    if read.flag("tie_word_embeddings"):
        raise read.error("tie_word_embeddings", "only false is supported: the embedding is normed")
    return {
        "rope": rope,
        "windows": read_windows(read, known, from_last),
        "unrotated": tuple(layer for layer, base in enumerate(bases) if base == 0),
        "attention_scale": read.number("qk_scale_factor", 3.87) * read.count("head_dim", 128) ** -0.5,
        "logit_scale": read.number("output_multiplier", 0.19611613513818404),
        "logit_softcap": read.number("final_logit_softcapping", 20.0),
        "post_norm_eps": read.number("post_norm_eps", 1e-8),
        "naming": _naming(read.number("rms_norm_eps", 1e-5)),
    }


KEYS = frozenset(
    """
    attention_bias final_logit_softcapping head_dim hidden_activation layer_rope_theta layer_types
    num_key_value_heads output_multiplier post_norm_eps qk_scale_factor rms_norm_eps rope_parameters
    sliding_window
    """.split()
)
FAMILIES: dict[str, Family] = {
    "MuseGlimmerForCausalLM": Family(
        "muse_glimmer_text", muse_glimmer, eos=200_001, bos=200_000, positions=131_072,
        heads=Heads(2, null_kv=False, dim=128, null_dim=False), rope=None, windows=None, flags=WITH_BIASES,
        activation=("hidden_activation", "silu"), norm_eps=("rms_norm_eps", 1e-5), keys=SHARED_KEYS | KEYS,
        fixed={
            "norm_offset": True, "plain_last_norm": True, "post_norms": True, "head_norms": True,
            "plain_head_norms": True, "gated_attention": True, "gates_apart": True,
        },
    ),
}  # fmt: skip
