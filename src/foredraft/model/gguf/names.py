"""The names of a GGUF file's tensors, and what its writer did to a tensor of Hugging Face.

Contract: this is the only place that knows llama.cpp's tensor names. A writer changes values in three ways:

- In architecture "llama" and a few after it (`REORDERED`) the rows of q and k of each head are reordered, so
  that the channels that RoPE rotates together are neighbours. Hugging Face pairs channels half a head apart.
- The norms of Gemma 1 to 3 multiply by 1 + weight; the file stores that sum.
- GPT-NeoX has the query, key and value of a head after those of another; the file has all queries first.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

__all__ = [
    "LONG_FACTORS",
    "ROPE_FACTORS",
    "SHORT_FACTORS",
    "adds_one",
    "file_name",
    "holds_factors",
    "model_name",
    "row_order",
]

ROPE_FACTORS = "rope_freqs.weight"  # what RoPE's frequencies are divided by, [D/2]
# LongRoPE's divisors, of one architecture
LONG_FACTORS, SHORT_FACTORS, LONG_ROPE = "rope_factors_long.weight", "rope_factors_short.weight", "phi3"
ADDING_ONE = ("gemma", "gemma2", "gemma3")
REORDERED = ("granite", "internlm2", "llama", "mistral3", "smollm3")
OUTER = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
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
SCALAR = "layer_scalar"  # a number, whose name in the model ends with this
GEMMA4 = {
    **GEMMA,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": SCALAR,
}
NORMED_AFTER = {  # OLMo 2 and EXAONE 4, whose sub-layers have norms after them alone
    **{name: own for name, own in LAYER.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_QKV = {**LAYER, "attn_qkv": "self_attn.qkv_proj"}
PHI3 = {**FUSED_QKV, "ffn_up": "mlp.gate_up_proj"}
SEED_OSS = {**LAYER, "post_attention_norm": LAYER["ffn_norm"]}
del SEED_OSS["ffn_norm"]
# architecture -> its parts of a layer, where they are not those of LAYER
PARTS = {
    "exaone4": NORMED_AFTER,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "glm4": {**GEMMA, "ffn_up": "mlp.gate_up_proj"},
    "gpt2": FUSED_QKV,
    "gptneox": FUSED_QKV,
    "olmo2": NORMED_AFTER,
    "phi3": PHI3,
    "seed_oss": SEED_OSS,
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
    if layer is None:
        return f"{found}.{kind}"
    return f"model.layers.{int(layer)}.{found}" + ("" if found == SCALAR else f".{kind}")


def file_name(architecture: str, name: str) -> str:
    """Return the name in a file of a tensor that Hugging Face names; the name itself if there is none.

    Examples:
        >>> file_name("llama", "model.layers.3.self_attn.q_proj.weight")
        'blk.3.attn_q.weight'
    """
    match = IN_MODEL.fullmatch(f"{name}.weight" if name.endswith(SCALAR) else name)
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
    if architecture == "gptneox" and match is not None and match[2] == "attn_qkv":
        return torch.arange(rows).view(3, heads, -1).transpose(0, 1).flatten()
    heads_of = {"attn_q": heads, "attn_k": kv_heads}
    if architecture not in REORDERED or match is None or match[2] not in heads_of:
        return None
    return torch.arange(rows).view(heads_of[match[2]], -1, 2).transpose(1, 2).flatten()


def adds_one(architecture: str, name: str) -> bool:
    """Return whether the file stores 1 + the weight."""
    return architecture in ADDING_ONE and name.endswith("norm.weight")


def holds_factors(architecture: str, name: str) -> bool:
    """Return whether a tensor of a file holds numbers of RoPE, which no layer has."""
    return name == ROPE_FACTORS or (architecture == LONG_ROPE and name in (LONG_FACTORS, SHORT_FACTORS))


def _parts(architecture: str) -> dict[str, str]:
    return PARTS.get(architecture, LAYER)
