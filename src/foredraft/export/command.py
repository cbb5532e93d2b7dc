"""The command that exports a head: checks of the options, the folder, or the GGUF file for llama.cpp.

Names, keys and shapes are those of llama.cpp's loader of architecture "eagle3"
(https://github.com/ggml-org/llama.cpp/blob/master/src/models/eagle3.cpp). `d2t` holds the target's ids
themselves, rows of q and k are reordered as for a Llama, vectors are float32, matrices keep their dtype.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft import demo
from foredraft.bench.contenders import module
from foredraft.bench.llama_cpp import DTYPES, add_vocabulary, interleaved
from foredraft.drafters.head_kinds import head_kind
from foredraft.drafters.heads.configs import OTHERS
from foredraft.drafters.heads.record import HeadRecord
from foredraft.drafters.heads.tensors import D2T, EMBEDDING, HEAD, T2D
from foredraft.drafters.heads.writing import (
    StoredHead,
    head_config,
    read_stored_head,
    specforge_lacks,
    speculators_names,
    write_head,
)
from foredraft.errors import ConfigError, Option
from foredraft.export import CHECKPOINT, GGUF, SPECFORGE, SPECULATORS
from foredraft.export.checkpoint import write_model
from foredraft.files import errors_named, replacing
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.model.checkpoint import Checkpoint
from foredraft.model.safetensors_file import SINGLE
from foredraft.model.spec import CONFIG
from foredraft.train.preparation import check_out

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
AUX_LAYERS = 3  # that the loader takes


def write_gguf_head(file: Path, head: StoredHead, target: Checkpoint) -> None:
    """Write a head to a file."""
    gguf = module("gguf", "a GGUF file")
    record, spec = head.record, head.record.spec
    check_supported(record)
    if target.source.tokenizer_json is None:
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
        writer.add_array(f"{ARCHITECTURE}.target_layers", list(record.aux_layers or ()))
        writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", record.norm_before_residual)
        writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", record.norm_before_fc)
        add_vocabulary(writer, target.source, target.spec, gguf)
        for name, tensor in head.tensors.items():
            if name not in (D2T, T2D):
                _add(writer, gguf, NAMES[name], _in_order(name, tensor, record))
        if head.draft_vocab is not None:
            writer.add_tensor(D2T, head.draft_vocab.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def check_supported(record: HeadRecord) -> None:
    """Raise ConfigError where llama.cpp computes something else than a head needs."""
    spec, aux_layers = record.spec, record.aux_layers or ()
    unsupported = {
        f"{spec.layers} layers": spec.layers != 1,
        f"{len(aux_layers)} auxiliary layers": len(aux_layers) != AUX_LAYERS,
        "a norm for each auxiliary layer": record.fc_norm,
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


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    out: str  # the folder, or the file
    format: str  # a name of `formats`
    taps: tuple[int, ...]  # the numbers of the target's layers after which the head reads
    words: int  # tokens that it can draft

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def export_head(draft: Path, format: str, out: Path, model: str | None = None, **load: Any) -> Exported:
    """Write a head in the format of another engine."""
    kind, name = ("mtp", "MTP head") if format == CHECKPOINT else ("eagle3", "EAGLE-3 head")
    if head_kind(draft) != kind:
        raise ConfigError(
            f"which is no {name}", option="draft", value=str(draft), remedy="give a head's folder"
        )
    given = options_for(model or demo.target_path(), device="cpu", draft=None, **load)
    target = find_target(given)
    if format == CHECKPOINT:
        with errors_named(out, "out", "give another place"):
            check_out(out, lambda found: False)
            write_model(out, draft, target)
        return Exported(str(out), format, (target.spec.layers,), target.spec.vocab_size)
    head = read_stored_head(draft, target)
    with errors_named(out, "out", "give another place"):
        if format == GGUF:
            if out.is_dir():
                raise ConfigError("which is a folder", option="out", value=str(out), remedy="give a file")
            with replacing(out) as new:
                write_gguf_head(new, head, target)
        else:
            check_out(out, lambda found: not found.samefile(draft) and _is_head(found))
            write_head(out, *_folder(head, format, target))
    return Exported(str(out), format, head.record.aux_layers or (), head.record.draft_vocab_size)


def _is_head(folder: Path) -> bool:
    return head_kind(folder) == "eagle3" and {file.name for file in folder.iterdir()} <= {CONFIG, SINGLE}


def _folder(head: StoredHead, format: str, target: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the tensors of a folder."""
    if format == SPECULATORS:
        record = replace(head.record, format=SPECULATORS)
        return head_config(head.body, record, target, head.dtype), speculators_names(head.tensors)
    assert format == SPECFORGE
    if (feature := specforge_lacks(head.record)) is not None:
        raise ConfigError(
            f"a head with {feature} is none that SGLang computes", option="format", value=format,
            remedy=("give ", Option("format", SPECULATORS)),
        )  # fmt: skip
    record = replace(head.record, format=OTHERS)
    return head_config(head.body, record, target, head.dtype), dict(head.tensors)
