"""Write an EAGLE-3 head as a GGUF file for llama.cpp.

Contract: names, keys and shapes are those that llama.cpp's loader of architecture "eagle3" asks for. `d2t`
holds the target's ids themselves, the rows of q and k are reordered as in every GGUF file of a Llama, vectors
are float32, and matrices keep their dtype. The vocabulary is the target's. A head that llama.cpp would
compute differently is refused.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.gguf_file import DTYPES, add_vocabulary, interleaved
from foredraft.bench.optional import module
from foredraft.drafters.heads.eagle3_files import D2T, EMBEDDING, HEAD, T2D
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.stored_head import StoredHead
from foredraft.errors import ConfigError
from foredraft.model.unread import Checkpoint

__all__ = ["write_gguf_head"]

ARCHITECTURE = "eagle3"
BLOCK = "blk.0"
NAMES = {
    "fc.weight": "fc.weight", "norm.weight": "output_norm.weight", HEAD: "output.weight",
    EMBEDDING: "token_embd.weight", "input_norm.weight": "enc.output_norm.weight",
    "midlayer.input_layernorm.weight": f"{BLOCK}.attn_norm.weight",
    "midlayer.hidden_norm.weight": f"{BLOCK}.attn_norm_2.weight",
    "midlayer.post_attention_layernorm.weight": f"{BLOCK}.ffn_norm.weight",
    "midlayer.self_attn.q_proj.weight": f"{BLOCK}.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": f"{BLOCK}.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": f"{BLOCK}.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": f"{BLOCK}.attn_output.weight",
    "midlayer.mlp.gate_proj.weight": f"{BLOCK}.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": f"{BLOCK}.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": f"{BLOCK}.ffn_down.weight",
}  # SpecForge's name -> the file's  # fmt: skip
TAPS = 3  # that the loader takes


def write_gguf_head(file: Path, head: StoredHead, target: Checkpoint) -> None:
    """Write a head to a file.

    Args:
        file: Where to write.
        head: The head.
        target: Its target, whose vocabulary the file holds.

    Raises:
        ConfigError: llama.cpp cannot compute this head, or gguf is not installed.
        OSError: The file cannot be written.
    """
    gguf = module("gguf", "a GGUF file")
    record, spec = head.record, head.record.spec
    check_supported(record)
    if not (target.folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{target.source} has no tokenizer.json, and the file holds the target's vocabulary",
            remedy="give a model with its tokenizer",
        )
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    try:
        for name, value in {
            "block_count": spec.layers, "context_length": spec.max_positions,
            "embedding_length": spec.hidden_size, "feed_forward_length": spec.intermediate_size,
            "attention.head_count": spec.heads, "attention.head_count_kv": spec.kv_heads,
            "attention.key_length": spec.head_dim, "attention.value_length": spec.head_dim,
            "rope.dimension_count": spec.head_dim, "vocab_size": spec.vocab_size,
            "target_hidden_size": record.target_size,
        }.items():  # fmt: skip
            writer.add_uint32(f"{ARCHITECTURE}.{name}", value)
        writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", spec.rope.theta)
        writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", spec.norm_eps)
        writer.add_array(f"{ARCHITECTURE}.target_layers", list(record.taps or ()))
        writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", record.norm_before_residual)
        writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", record.norm_before_fc)
        add_vocabulary(writer, target.folder, target.spec, gguf)
        for name, tensor in head.tensors.items():
            if name not in (D2T, T2D):
                _add(writer, gguf, NAMES[name], _in_order(name, tensor, record))
        if head.words is not None:
            writer.add_tensor(D2T, head.words.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def check_supported(record: HeadRecord) -> None:
    """Raise ConfigError where llama.cpp computes something else than a head needs."""
    spec, taps = record.spec, record.taps or ()
    unsupported = {
        f"{spec.layers} layers": spec.layers != 1,
        f"{len(taps)} taps": len(taps) != TAPS,
        "a norm for each tap": record.fc_norm,
        "a normed state that recurs": record.norm_output,
        "norms of queries and keys": spec.head_norms,
        "biases": spec.qkv_bias or spec.output_bias or spec.mlp_bias,
        f"rope type {spec.rope.kind!r}": spec.rope.kind != "default",
    }
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(
                f"a head with {feature} is none that llama.cpp computes", option="format", value="gguf",
                remedy="give another format",
            )  # fmt: skip


def _in_order(name: str, tensor: Tensor, record: HeadRecord) -> Tensor:
    heads = {"q_proj": record.spec.heads, "k_proj": record.spec.kv_heads}.get(name.split(".")[-2], 0)
    return interleaved(tensor, heads) if heads else tensor


def _add(writer: Any, gguf: Any, name: str, tensor: Tensor) -> None:
    """Add a matrix in its own dtype, or a vector in float32."""
    values = (tensor if tensor.dim() > 1 else tensor.float()).contiguous()
    if values.dtype not in DTYPES:
        values = values.float()
    raw = getattr(gguf.GGMLQuantizationType, DTYPES[values.dtype])
    if values.dtype == torch.float32:
        writer.add_tensor(name, values.numpy(), raw_dtype=raw)
    else:  # NumPy has no bfloat16; the writer takes the shape of the bytes
        writer.add_tensor(name, values.view(torch.uint8).numpy(), raw_dtype=raw)
