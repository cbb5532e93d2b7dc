"""The names of a GGUF file's tensors, and what its writer did to a tensor of Hugging Face.

Contract: this is the only place that knows llama.cpp's tensor names. A writer changes values in two ways:

- In architecture "llama" the rows of q and k of each head are reordered, so that the channels that RoPE
  rotates together are neighbours. Hugging Face pairs channels half a head apart.
- Gemma's norms multiply by 1 + weight; the file stores that sum.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

__all__ = ["ROPE_FACTORS", "adds_one", "file_name", "model_name", "row_order"]

ROPE_FACTORS = "rope_freqs.weight"  # what RoPE's frequencies are divided by, [D/2]
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
GEMMA = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
IN_FILE = re.compile(r"(?:blk\.(0|[1-9][0-9]*)\.)?(\w+)\.(weight|bias)")  # "01" would be layer 1 again
IN_MODEL = re.compile(r"(?:model\.layers\.(\d+)\.)?([\w.]+)\.(weight|bias)")


def model_name(architecture: str, name: str) -> str | None:
    """Return the name that Hugging Face gives a tensor of a file; None for one that it does not have.

    Examples:
        >>> model_name("llama", "blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'
    """
    match = IN_FILE.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    found = OUTER.get(part) if layer is None else _parts(architecture).get(part)
    if found is None:
        return None
    return f"{found}.{kind}" if layer is None else f"model.layers.{int(layer)}.{found}.{kind}"


def file_name(architecture: str, name: str) -> str:
    """Return the name in a file of a tensor that Hugging Face names; the name itself if there is none.

    Examples:
        >>> file_name("llama", "model.layers.3.self_attn.q_proj.weight")
        'blk.3.attn_q.weight'
    """
    match = IN_MODEL.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    names = OUTER if layer is None else _parts(architecture)
    found = next((own for own, theirs in names.items() if theirs == part), None)
    if found is None:
        return name
    return f"{found}.{kind}" if layer is None else f"blk.{layer}.{found}.{kind}"


def row_order(architecture: str, name: str, rows: int, heads: int, kv_heads: int) -> Tensor | None:
    """Return the row of the file for each row of the model's tensor, [rows]; None where they are the same.

    Args:
        architecture: That of the file.
        name: The name in the file.
        rows: Rows of the tensor.
        heads: Query heads of the model.
        kv_heads: Its key heads.
    """
    match = IN_FILE.fullmatch(name)
    heads_of = {"attn_q": heads, "attn_k": kv_heads}
    if architecture != "llama" or match is None or match[2] not in heads_of:
        return None
    return torch.arange(rows).view(heads_of[match[2]], -1, 2).transpose(1, 2).flatten()


def adds_one(architecture: str, name: str) -> bool:
    """Return whether the file stores 1 + the weight."""
    return architecture.startswith("gemma") and name.endswith("norm.weight")


def _parts(architecture: str) -> dict[str, str]:
    return GEMMA if architecture.startswith("gemma") else LAYER
