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

from tests.support.gguf_files import permuted, quantised, write_tensors
from tests.support.heads import BODY, HEADS, KV_HEADS, LAYERS, defined_logits, save_head

AUX = [2, LAYERS // 2, LAYERS - 3]
LAYER = {  # the names of a layer's tensors
    "hidden_norm": "attn_norm_2", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip
# format -> the format in safetensors files of the same head, and the type of the matrices
FORMATS = {"gguf": ("residual", "F32"), "gguf whole": ("whole", "Q8_0")}


def save_gguf_head(
    file: Path,
    format: str,
    vocabulary: int,
    *,
    kind: str | None = None,
    keys: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    head_tensors: dict[str, Tensor] | None = None,
    **head: Any,
) -> Path:
    """Write a head in one of FORMATS, and beside it the folder `FILE-plain` of the same head in safetensors.

    `kind` replaces the type of the matrices, `keys` those of the architecture; None drops one. `tensors` changes the
    tensors, by their names in the file.
    """
    plain, usual = FORMATS[format]
    folder = save_head(plain_of(file), plain, vocabulary, tensors=head_tensors, **head)
    config = json.loads((folder / "config.json").read_text())
    flags = {flag: True for flag in ("norm_before_residual", "norm_before_fc") if config.get(flag)}
    own = {"target_layers": AUX, "target_hidden_size": BODY["hidden_size"]}

    def changed(arrays: dict[str, np.ndarray]) -> None:
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            arrays[f"blk.0.{name}.weight"] = permuted(arrays[f"blk.0.{name}.weight"], heads)
        tensors(arrays)

    body, own = {**BODY, "vocab_size": vocabulary}, {**flags, **own, **(keys or {})}
    return write_head_gguf(file, "eagle3", body, own, kind or usual, changed)


def write_head_gguf(
    file: Path,
    architecture: str,
    body: dict[str, Any],
    keys: dict[str, Any],
    kind: str,
    tensors: Callable[[dict[str, np.ndarray]], None],
    mask: int | None = None,
) -> Path:
    plain = plain_of(file) / "model.safetensors"
    stored, raw = load_file(plain), gguf.GGMLQuantizationType[kind]

    def fits(values: Any) -> bool:
        return values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[raw][0] == 0

    def rounded(t: Tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(quantised(t.numpy(), kind), raw).copy()).view(t.shape)

    save_file({name: rounded(t) if fits(t) else t for name, t in stored.items()}, plain)
    written = {
        "context_length": body["max_position_embeddings"], "embedding_length": body["hidden_size"],
        "block_count": body["num_hidden_layers"], "feed_forward_length": body["intermediate_size"],
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": body["rms_norm_eps"], "rope.freq_base": body["rope_theta"],
        "vocab_size": body["vocab_size"], **keys,
    }  # fmt: skip
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in written.items():
        add_value(writer, f"{architecture}.{key}", value)
    add_value(writer, "tokenizer.ggml.mask_token_id", mask)
    arrays: dict[str, np.ndarray] = {}
    for name, t in stored.items():
        part, _, end = name.replace("midlayer.", "layers.0.").rpartition(".")
        if part.startswith("layers."):
            _, index, part = part.split(".", 2)
            arrays[f"blk.{index}.{LAYER[part]}.{end}"] = t.float().numpy()
        elif part in OUTER:
            arrays[f"{OUTER[part]}.{end}"] = t.float().numpy()
    if "d2t" in stored:
        arrays["d2t"] = (stored["d2t"] + torch.arange(len(stored["d2t"]))).numpy()
    tensors(arrays)
    write_tensors(writer, arrays, lambda name, values: kind if fits(values) else "F32")
    return file


def plain_of(file: Path) -> Path:
    return file.with_name(f"{file.name}-plain")


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
    return defined_logits(plain_of(file), model, text, drafted)
