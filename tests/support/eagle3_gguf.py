"""Write an EAGLE-3 head as a GGUF file, as llama.cpp's converter does it, with the `gguf` package's writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.gguf_files import add_tensor, permuted, quantised
from tests.support.heads import BODY, HEADS, KV_HEADS, LAYERS, defined_logits, save_head

TAPS = [2, LAYERS // 2, LAYERS - 3]
NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
# spelling -> the spelling in safetensors files of the same head, and the type of the matrices
SPELLINGS = {"gguf": ("residual", "F32"), "gguf whole": ("whole", "Q8_0")}


def save_gguf_head(
    file: Path,
    spelling: str,
    vocabulary: int,
    *,
    kind: str | None = None,
    keys: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    head_tensors: dict[str, Tensor] | None = None,
    **head: Any,
) -> Path:
    """Write a head, and beside it the folder `FILE-plain` of the same head in safetensors.

    Args:
        file: The head's.
        spelling: A key of SPELLINGS.
        vocabulary: Size of the target's.
        kind: Replaces the type of the matrices.
        keys: Replaces or adds keys of the architecture; None drops one.
        tensors: Changes the tensors, by their names in the file.
        head_tensors: Replace or add tensors of the head before it is written.
        **head: Further arguments of `save_head`.
    """
    plain, usual = SPELLINGS[spelling]
    kind = kind or usual
    folder = save_head(file.with_name(f"{file.name}-plain"), plain, vocabulary, tensors=head_tensors, **head)
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    raw = gguf.GGMLQuantizationType[kind]
    rounded: dict[str, Tensor] = {
        name: torch.from_numpy(gguf.quants.dequantize(quantised(t.numpy(), kind), raw).copy()).view(t.shape)
        if t.dim() == 2 and t.shape[1] % gguf.GGML_QUANT_SIZES[raw][0] == 0
        else t
        for name, t in stored.items()
    }
    save_file(rounded, folder / "model.safetensors")
    written = {
        "context_length": BODY["max_position_embeddings"], "embedding_length": BODY["hidden_size"],
        "block_count": 1, "feed_forward_length": BODY["intermediate_size"], "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.layer_norm_rms_epsilon": BODY["rms_norm_eps"],
        "rope.freq_base": BODY["rope_theta"], "vocab_size": vocabulary, "target_layers": TAPS,
        "target_hidden_size": BODY["hidden_size"], **(keys or {}),
    }  # fmt: skip
    for flag in ("norm_before_residual", "norm_before_fc"):
        if config.get(flag):
            written.setdefault(flag, True)
    writer = gguf.GGUFWriter(file, "eagle3")
    for key, value in written.items():
        add_value(writer, f"eagle3.{key}", value)
    arrays = {NAMES[name]: t.float().numpy() for name, t in stored.items() if name in NAMES}
    for own, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        arrays[f"blk.0.{own}.weight"] = permuted(arrays[f"blk.0.{own}.weight"], heads)
    if "d2t" in stored:
        arrays["d2t"] = (stored["d2t"] + torch.arange(len(stored["d2t"]))).numpy()
    tensors(arrays)
    for name, values in arrays.items():
        if values.dtype == np.int64:
            writer.add_tensor(name, values)
        else:
            fits = values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[raw][0] == 0
            add_tensor(writer, name, values, kind if fits else "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)


def defined_gguf(file: Path, model: Any, text: list[int], drafted: list[int]) -> Tensor:
    """Return the logits of the folder beside the file, as `heads.defined_logits` does."""
    return defined_logits(file.with_name(f"{file.name}-plain"), model, text, drafted)
